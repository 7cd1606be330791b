"""The metrics of gates beside those of error sums: tasks, plans, formats, distributions."""

from __future__ import annotations

from qgate.metrics._table import METRICS, Metric

for _metric in (
    Metric(
        name="one_minus_correlation", label="1 - Correlation", direction="lower", relative=True,
        sources=("gate",), complement_of="correlation", definition="1 - Pearson's correlation",
    ),
    Metric(
        name="bits_per_byte", label="Bits per Byte", unit="bit", direction="lower",
        sources=("task",), definition="cross-entropy of the text, in bits, over its bytes",
    ),
    Metric(
        name="task_metric", label="Task Metric", direction="steady", task=True,
        sources=("metric",),
        definition="figure that the metric of a model's own task returns, mean over samples",
    ),
    Metric(
        name="task_change", label="Change of the Task", direction="lower", sources=("gate",),
        definition="largest mean change of the figure of the task (bits per byte, or the metric "
        "of a model's own) in the 95 % interval of the samples",
    ),
    Metric(
        name="kl_divergence", label="KL Divergence", unit="nat", direction="lower", relative=True,
        sources=("task",), definition="mean over tokens of KL(reference | actual)",
    ),
    Metric(
        name="next_token_accuracy", label="Next-Token Accuracy", direction="higher", bounded=True,
        sources=("task",), definition="share of tokens that are predicted first",
    ),
    # Figures of a task that limits may be about; none has to be accepted. -------------------------
    Metric(
        name="kl_q99", label="KL, 99 %", unit="nat", direction="lower", relative=True,
        sources=("metric",), definition="KL that 99 % of the tokens do not exceed",
    ),
    Metric(
        name="kl_q999", label="KL, 99.9 %", unit="nat", direction="lower", relative=True,
        sources=("metric",), definition="KL that 99.9 % of the tokens do not exceed",
    ),
    Metric(
        name="token_flips", label="Flipped Tokens", direction="lower", sources=("metric",),
        definition="share of tokens at which another token is the most likely one",
    ),
    Metric(
        name="tokens_lost", label="Right Tokens Lost", direction="lower", sources=("metric",),
        definition="share of tokens that the reference predicts first and the mode does not",
    ),
    Metric(
        name="tokens_gained", label="Right Tokens Gained", direction="lower", sources=("metric",),
        definition="share of tokens that the mode predicts first and the reference does not",
    ),
    Metric(
        name="perplexity_ratio", label="Perplexity Ratio", direction="lower", sources=("metric",),
        definition="perplexity of the mode over that of the reference",
    ),
    Metric(
        name="accuracy_kept", label="Accuracy Kept", direction="higher", sources=("metric",),
        definition="accuracy, or the task metric, over that of the reference: lower end of the "
        "95 % interval of paired samples",
    ),
    Metric(
        name="error_growth", label="Growth of the Error (log2)", direction="steady",
        logarithm="log2", sources=("long_text",), room=5.0,
        definition="log2 of the KL divergence in the last quarter of a long text over that in the "
        "first",
    ),
    Metric(
        name="predicted_tokens", label="Tokens Predicted", direction="higher",
        sources=("long_text",),
        definition="tokens of a long text before the loss leaves the 95 % interval of the "
        "reference's for good",
    ),
    Metric(
        name="quantizer", label="Quantizer", direction="equal", textual=True, sources=("plan",),
        definition="what quantizes a site, in words",
    ),
    Metric(
        name="static_scale", label="Calibrated Scale", direction="steady", sources=("plan",),
        definition="static scale that calibration samples decided; of many channels their "
        "geometric mean",
    ),
    Metric(
        name="differing_share", label="Differing Values", direction="lower",
        sources=("conformance",),
        definition="share of quantized values that are not those of the definition, bit for bit",
    ),
    Metric(
        name="disagreeing_share", label="Disagreeing Values", direction="lower",
        sources=("conformance",),
        definition="share of values that a module gives for one input and not for another like it",
    ),
    Metric(
        name="saturated_share", label="Saturated", direction="steady", counted=True,
        sources=("format",),
        definition="share of finite elements above the largest value when rounded without a bound",
    ),
    Metric(
        name="flushed_share", label="Flushed", direction="steady", counted=True,
        sources=("format",),
        definition="share of finite elements that are not zero and become zero",
    ),
    Metric(
        name="exponent", label="Scale Exponent", direction="equal", sources=("format",),
        definition="exponent of the power of two that a sweep recommends",
    ),
    # Of a mixture of experts. ---------------------------------------------------------------------
    Metric(
        name="router_flips", label="Router Flips", direction="lower", counted=True,
        sources=("experts",),
        definition="share of tokens that choose another set of experts than in the reference",
    ),
    Metric(
        name="weight_shift", label="Weight Shift", direction="lower", sources=("experts",),
        definition="half the sum of changes of a token's weights at all experts, mean over tokens",
    ),
    Metric(
        name="token_share", label="Share of Tokens", direction="steady", counted=True,
        sources=("experts",),
        definition="share of all choices of all tokens that an expert got",
    ),
    # The range of values, where neither way is better. ------------------------------------------
    Metric(
        name="log2_mean", label="Mean Magnitude (log2)", direction="steady", logarithm="log2",
        sources=("dump",), definition="log2 of the mean magnitude",
    ),
    Metric(
        name="log2_p90", label="90 % Magnitude (log2)", direction="steady", logarithm="log2",
        sources=("dump",), definition="log2 of the 90th percentile of magnitudes",
    ),
    Metric(
        name="log2_tail", label="Tail (log2)", direction="steady", logarithm="log2",
        sources=("dump", "activations"),
        definition="log2 of the fourth root of the fourth moment over the root of the second",
    ),
    Metric(
        name="log2_nonzero", label="Share Not Zero (log2)", direction="steady", logarithm="log2",
        sources=("dump",), definition="log2 of the share that is not zero",
    ),
    Metric(
        name="log2_amax", label="Largest Magnitude (log2)", direction="steady", logarithm="log2",
        sources=("activations",), definition="log2 of the largest magnitude, mean over samples",
    ),
    Metric(
        name="log2_median", label="Median Token (log2)", direction="steady", logarithm="log2",
        sources=("activations",),
        definition="log2 of the median of the largest magnitudes of tokens",
    ),
    Metric(
        name="log2_outliers", label="Outlier Tokens (log2)", direction="steady", logarithm="log2",
        sources=("activations",),
        definition="log2 of one more than the tokens beyond the threshold",
    ),
    Metric(
        name="log2_channel", label="Channel Ratio (log2)", direction="steady", logarithm="log2",
        sources=("activations",), definition="log2 of the largest channel over the median channel",
    ),
    # Weights of a quantized checkpoint beside its parent's. --------------------------------------
    Metric(
        name="findings", label="Findings", direction="lower",
        sources=("checkpoint", "engines"),
        definition="what is not as the recipe of a checkpoint declares, or not the weight of the "
        "other engine, counted",
    ),
    Metric(
        name="over_ideal_db", label="Over Ideal", unit="dB", direction="steady",
        logarithm="decibel", sources=("checkpoint",),
        definition="error of a weight over that of an ideal quantizer of its format, of experts "
        "the worst",
    ),
    Metric(
        name="bits_per_weight", label="Bits per Weight", unit="bit", direction="steady",
        sources=("checkpoint",), definition="size of the files' tensors over all parameters",
    ),
    # Two engines on the same tokens. -------------------------------------------------------------
    Metric(
        name="kl", label="KL of Engines", unit="nat", direction="lower", relative=True,
        sources=("engines",),
        definition="mean over tokens of KL(reference | actual) over the whole vocabulary",
    ),
    Metric(
        name="k3", label="k3 of Engines", unit="nat", direction="lower", relative=True,
        sources=("engines",),
        definition="mean over tokens of exp(d) - 1 - d, where d is the difference of "
        "log-probabilities",
    ),
    Metric(
        name="largest_logprob", label="Largest Difference of a Log-Probability", unit="nat",
        direction="lower", relative=True, sources=("engines",),
        definition="largest magnitude of the difference of a token's log-probabilities",
    ),
    Metric(
        name="flips_share", label="Top-1 Flips", direction="lower", counted=True,
        sources=("engines",), definition="share of positions with another most likely token",
    ),
    Metric(
        name="equal_share", label="Equal Tokens", direction="higher", bounded=True,
        sources=("engines",), definition="share of tokens with equal log-probabilities",
    ),
    Metric(
        name="compared_tokens", label="Compared Tokens", direction="equal", sources=("engines",),
        definition="tokens with a log-probability of both engines",
    ),
):  # fmt: skip
    METRICS.add(_metric)
