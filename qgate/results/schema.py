"""Types of `results.jsonl`: a header line, then one JSON object per comparison.

JSON has no NaN and no infinity: they are written as null, and the record's `reason` has the
number: `{"/values/relative_mse": "nan"}`. `results.schema.json` is generated from the types
here.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, TypedDict

from qgate.records import Meta
from qgate.results.coverage import RunExtent
from qgate.results.pictures import Count, Picture
from qgate.results.run_facts import AcrossWeights, LooserLimit, ModePower, OtherTests, TaskSummary

Record = dict[str, Any]
Numbers = dict[str, float | None]
_ShardNumber = Annotated[int, Meta(ge=1, le=999999)]


class RecordedCheck(TypedDict):
    """One metric of one comparison against one limit.

    metric     its name, such as relative_mse; relative_mse@worst_channel is that of a part
    kind       the limit: conformance, budget, regression, absolute; or nonfinite, missing (nothing
               accepted), absent (accepted, not measured), nothing
    value      null where it does not exist or is not finite: see `reason` of the record
    side       how the value has to be to the bound
    bound      null where there is no bound: nothing accepted, nothing measured
    times      how many times its limit; null where no number says it
    improved   better than accepted by more than what a regression may be
    against    the accepted error, or that of the ideal quantizer
    allowed    permitted deviation, as a share, or in dB for a budget
    source     setting or marker of the limit
    text       the value of a metric of texts; value is 0 if it is the accepted one, else 1
    accepted_text  the text that was accepted
    accepted_on  the device of the accepted value where other arithmetic than this run's made it
    room       how much the arithmetic of this device adds, which the bound allows too
    """

    metric: str
    kind: str
    passed: bool
    value: float | None
    side: Literal["<=", ">=", "=="]
    bound: float | None
    times: float | None
    improved: bool
    site: NotRequired[str]
    layer: NotRequired[str]
    scope: NotRequired[str]
    order: NotRequired[int]
    against: NotRequired[float | None]
    allowed: NotRequired[float | None]
    quantizer: NotRequired[str]
    source: NotRequired[str]
    reason: NotRequired[str]
    text: NotRequired[str]
    accepted_text: NotRequired[str]
    accepted_on: NotRequired[str]
    room: NotRequired[float]


class Commands(TypedDict):
    """Commands to type after a comparison that failed.

    again   repeats the test
    accept  accepts the measured errors; empty where none can be
    """

    again: str
    accept: str


class FindingWords(TypedDict):
    """Words about a comparison that failed.

    fault      what is wrong, after the name of the site: "is truncated, not rounded to the nearest"
    figures    by how much, against what
    diagnosed  true if a known fault explains the tensors
    """

    fault: str
    figures: str
    diagnosed: bool


class GateRecord(TypedDict):
    """One comparison at one site. Hooks may add keys.

    node      the test, as pytest names it
    site      a named place where a tensor flows
    scope     carried, local, sweep, forward, backward, task, or a name of your own suite
    values    metrics by name
    ideal     the same of an ideal quantizer
    accepted  accepted metrics
    seconds   of the whole test
    order     place of the site in the order of execution
    attempt   0, then 1 for a rerun; the last one counts
    grades    for display only
    reason    the number behind a null: JSON pointer into the record to nan, inf or -inf
    pictures  data to be drawn; no verdict depends on it
    commands  commands to type after a failed comparison
    finding   what is wrong, of a comparison that failed
    failure   why a gate failed whose comparisons passed
    code      of a failed site, where one's own code computes it: FILE:LINE NAME
    reproduction  folder below `repro`, with the site's tensors and a script that compares them
    xfailed   the reason of a gate that was expected to fail, and did: it counts neither way
    """

    suite: str
    node: str
    model: str
    mode: str
    layer: str
    site: str
    scope: str
    values: Numbers
    ideal: Numbers | None
    accepted: Numbers | None
    checks: list[RecordedCheck]
    passed: bool
    seconds: Annotated[float, Meta(ge=0)]
    order: NotRequired[int]
    attempt: NotRequired[Count]
    title: NotRequired[str]
    file: NotRequired[str]
    line: NotRequired[Count]
    grades: NotRequired[dict[str, Literal["excellent", "good", "fair", "poor"]]]
    without_massive: NotRequired[Numbers]
    notes: NotRequired[Any]
    reason: NotRequired[dict[str, str]]
    pictures: NotRequired[list[Picture]]
    commands: NotRequired[Commands]
    finding: NotRequired[FindingWords]
    failure: NotRequired[str]
    code: NotRequired[str]
    reproduction: NotRequired[str]
    xfailed: NotRequired[str]


class HeaderMetric(TypedDict):
    """A row of the table of metrics."""

    name: str
    direction: NotRequired[Literal["lower", "higher", "steady", "equal"]]
    label: NotRequired[str]
    unit: NotRequired[str]
    definition: NotRequired[str]
    degree: NotRequired[int]
    bounded: NotRequired[bool]
    logarithm: NotRequired[str]
    signed: NotRequired[bool]


class RunShard(TypedDict):
    """The part of a divided run that a file is; `complete` says whether all of that part ran."""

    number: _ShardNumber
    of: _ShardNumber
    complete: bool


class BaselineUpdate(TypedDict):
    """Changes that an update of baselines wrote, or would write."""

    which: str
    dry_run: bool
    done: bool
    entries: Count
    changes: list[str]
    stale: list[str]


class AcceptedAt(TypedDict):
    """The commit that changed the accepted errors of a mode last, and its date."""

    model: str
    mode: str
    commit: str
    date: str


class RunHeader(TypedDict):
    """The first line of a file.

    started    ISO 8601, UTC
    plans      model and mode to site to quantizer
    models     hashes of weights and samples, the device
    records    how many records follow; not there while the run goes on
    complete   true if every selected test ran
    shard      the part of a divided run that this is; null where it was not divided
    extent     how many gates were held, and which were not; not there while the run goes on
    exit       the exit status; null while the run goes on
    broken     tests whose set-up failed, so that there is no verdict: node to first line
    errors     errors of writing, and the like
    looser     limits that are looser than the default
    power      smallest defects that the limits in force see, by mode
    tasks      figures of the task beside the reference's, by mode
    across_weights  models whose errors were held against those of other weights
    notes      omitted tests, and accepted errors that were not measured
    baselines  their folder, as messages show it
    accepted_at  when accepted errors changed last; where CI is set and git says it
    """

    schema: Literal[1]
    kind: Literal["header"]
    qgate: str
    python: str
    torch: str | None
    device: str
    seed: int | None
    commit: str | None
    command: list[str]
    started: str
    modes: list[str]
    plans: dict[str, dict[str, str]]
    metrics: list[HeaderMetric]
    limits: list[dict[str, Any]]
    models: dict[str, dict[str, Any]]
    reference: NotRequired[str]
    records: NotRequired[Count]
    complete: NotRequired[bool]
    shard: NotRequired[RunShard | None]
    extent: NotRequired[RunExtent]
    exit: NotRequired[int | None]
    broken: NotRequired[dict[str, str]]
    errors: NotRequired[list[str]]
    looser: NotRequired[list[LooserLimit]]
    power: NotRequired[list[ModePower]]
    tasks: NotRequired[list[TaskSummary]]
    across_weights: NotRequired[list[AcrossWeights]]
    notes: NotRequired[list[str]]
    other: NotRequired[OtherTests]
    baselines: NotRequired[str | None]
    accepted_at: NotRequired[list[AcceptedAt]]
    update: NotRequired[BaselineUpdate | None]
    reason: NotRequired[dict[str, str]]
