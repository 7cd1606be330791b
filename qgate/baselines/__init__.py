"""The truth on disk: FP32 references and accepted errors per model, changed by a verb only."""

from qgate.baselines.accepted import Accepted, accepted_file
from qgate.baselines.candidates import (
    Candidate,
    drop_candidate,
    read_candidates,
    update_of,
    write_candidate,
)
from qgate.baselines.checking import unheld, unused, verify
from qgate.baselines.names import safe_name
from qgate.baselines.origin import Key, Origin, differences, kind_of
from qgate.baselines.packing import joined, pack, unpack
from qgate.baselines.rows import BaselineRows, ReferenceTensor, row_sample, same_rows
from qgate.baselines.store import Store, stored_models
from qgate.baselines.update import StoredChange, Update, brief

__all__ = [
    "Accepted",
    "BaselineRows",
    "Candidate",
    "Key",
    "Origin",
    "ReferenceTensor",
    "Store",
    "StoredChange",
    "Update",
    "accepted_file",
    "brief",
    "differences",
    "drop_candidate",
    "joined",
    "kind_of",
    "pack",
    "read_candidates",
    "row_sample",
    "safe_name",
    "same_rows",
    "stored_models",
    "unheld",
    "unpack",
    "unused",
    "update_of",
    "verify",
    "write_candidate",
]
