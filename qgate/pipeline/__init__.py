"""Where the parts meet: from files to records."""

from qgate.pipeline.sweep_files import Request, sweep_file

__all__ = ["Request", "sweep_file"]
