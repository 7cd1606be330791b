"""Measure activations and weights: magnitudes, outliers, formats, smoothing, sensitivity.

  qgate activations --model tiny-llama
  qgate activations --model hf:PATH --config my.yaml --data.num_samples 128
  qgate activations --model hf:PATH --outlier.threshold 100 --sensitivity.enabled true
  qgate activations --model hf:PATH --list-layers 'down_proj'
  qgate activations --model hf:PATH --jobs 2
  qgate activations --write-config my.yaml
  qgate activations figures/activations.json --dpi 300

Every key of the configuration is also an option; `--write-config` prints all keys with comments.
Keys of the section `visualization` need no section name, and lists are separated by commas. The
command writes pictures, tables and analysis_report.html to visualization.save_dir, a folder or a
URL (s3://bucket/folder). Given the activations.json of an earlier run, or the folder with it, the
command draws it again without the model. Exit status: 1 if values are not finite or a selected
module never ran, 2 if nothing could be run.
"""

from __future__ import annotations

import argparse

from qgate.cli._console import add_json
from qgate.cli._workers import add_workers, workers_from
from qgate.errors import QgateError


def arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", metavar="NAME", help="tiny-llama, hf:PATH, mamba:PATH, FILE.py:build; "
        "hf:PATH=NAME is called NAME; over model.path of the configuration")  # fmt: skip
    add("--config", metavar="FILE", help="a configuration (.yaml or .toml), or its URL")
    add("--list-layers", nargs="?", const=".", metavar="REGEX", help="print the names of the "
        "model's modules (those that match), and stop")  # fmt: skip
    add("--write-config", nargs="?", const="-", metavar="FILE", help="print the commented "
        "defaults, or write them to a new file (.yaml or .toml), and stop")  # fmt: skip
    add_json(parser)
    add("--dry-run", action="store_true", help="check all there is to check before the first "
        "forward pass, say what would run, and stop")  # fmt: skip
    add("--verbose", action="store_true", help="print every setting and how long each step took")
    add("--trust-remote-code", action="store_true", help="let Python files that come with an "
        "hf: folder run on this machine; only for folders whose code you have read")  # fmt: skip
    add_workers(parser)
    parser.set_defaults(takes_more=True)


def run(args: argparse.Namespace) -> int:
    from qgate.cli import _activation_records as records

    workers = workers_from(args)
    try:
        record, overrides = records.words(args.more)
    except QgateError:
        args.parser.refuse_misspelled(args.more)
        raise
    if record is not None:
        return records.redraw(record, overrides, args)
    if args.write_config is not None:
        if overrides or args.model or args.config or args.list_layers or args.dry_run:
            raise QgateError("--write-config writes the defaults; it goes with no other option.")
        return records.write_config(args.write_config)
    from qgate.cli import _activation_runs

    return _activation_runs.run(args, overrides, workers)
