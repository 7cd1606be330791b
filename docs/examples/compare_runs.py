"""Compare a mode with its reference, carried and local."""

from qgate import capture, models, modes

model = models.load("tiny-mamba", sampling=models.Sampling(samples=2, seqlen=128, calib_samples=8))
scales = modes.measure(model, modes.CalibrationSettings(percentile_alpha=0.9995))
quantized = modes.apply(modes.modes_of(model, "2-1")[0], model, scales)

reference = model.in_basis(quantized.mode.basis)
carried = capture.compare_runs(quantized.model, reference)  # the whole model quantized
local = capture.compare_runs(quantized.model, reference, local=True)  # each block alone
for site in carried:
    print(site, carried[site].metric("sqnr_db"), local[site].metric("sqnr_db"))
