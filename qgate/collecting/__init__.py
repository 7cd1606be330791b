"""Collect tensors of a model while it trains or infers, without a change to either.

`qgate.collect` returns a `Collector`. Hooks and the reading of tensors run in the model's own
thread and are kept short; figures and files are made in a second thread.
"""

from typing import TYPE_CHECKING

from qgate.exports import lazy

if TYPE_CHECKING:
    from qgate.collecting.collector import Collector, is_collecting
    from qgate.collecting.first_model import FirstModel
    from qgate.collecting.settings import CollectSettings

__all__ = ["CollectSettings", "Collector", "FirstModel", "is_collecting"]

__getattr__ = lazy(
    __name__,
    {
        "collector": "Collector is_collecting",
        "first_model": "FirstModel",
        "settings": "CollectSettings",
    },
)
