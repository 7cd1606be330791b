"""What a run is called, so that a dump knows what an earlier run has left in its folder.

Ranks do not wait for each other to begin a dump, so they agree through the store of their process
group: the first to come writes a name there, the others find it.
"""

from __future__ import annotations

import collections
import uuid

import torch

_begun: collections.Counter[str] = collections.Counter()


def agreed_run(folder: str) -> str:
    """The name of this collection into a folder, one for all ranks of the process group.

    Empty without a process group, and where its store cannot be asked. Every rank asks once for
    each collection, also one that collects nothing: they count them.
    """
    dist = torch.distributed
    if not (dist.is_available() and dist.is_initialized()):
        return ""
    try:
        store = dist.distributed_c10d._get_default_store()
        _begun[folder] += 1
        key = f"qgate.collect/{folder}/{_begun[folder]}"
        found = store.compare_set(key, "", uuid.uuid4().hex)
    except (RuntimeError, ValueError, AttributeError):
        return ""
    return found.decode() if isinstance(found, bytes) else str(found)
