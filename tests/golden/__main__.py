"""Show what a change did to the golden outputs, or accept it.

python -m tests.golden                    compare all; exit status 1 if anything differs
python -m tests.golden draw sweep-        only groups or cases whose names begin so
python -m tests.golden --write            store what is written now
python -m tests.golden --all-lines        every line that differs, not the first of each file
python -m tests.golden --default-arithmetic    with the vectors and threads of this machine
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.golden import running


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.golden",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="groups, or the beginnings of cases")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--all-lines", action="store_true")
    parser.add_argument("--default-arithmetic", action="store_true")
    args = parser.parse_args()
    if args.write and args.default_arithmetic:
        parser.error("what is stored comes from plain arithmetic: leave out --default-arithmetic")
    running.STORED.mkdir(exist_ok=True)
    differing, files = [], 0
    selected = running.selected(args.names)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="qgate-golden-") as folder:
        output_dir = Path(folder)
        running.run_groups(selected, output_dir, plain=not args.default_arithmetic)
        cases = [case for of_group in selected.values() for case in of_group]
        for case in cases:
            file_differences = running.case_differences(case, output_dir)
            if file_differences:
                differing.append(case)
                files += len(file_differences)
                print(running.shown(case, file_differences, 10**9 if args.all_lines else 20))
            if args.write:
                running.write_case(case, output_dir)
    print(f"{len(cases)} cases in {time.perf_counter() - start:.1f} s", file=sys.stderr)
    if args.write and not args.names:
        print(
            *(f"{name}: removed, there is no such case" for name in running.remove_unknown()),
            sep="\n",
        )
    if not differing:
        print("all golden outputs are the same")
    elif args.write:
        print(f"written: {files} files of {len(differing)} cases")
    else:
        print(f"{files} files of {len(differing)} cases differ: {', '.join(differing)}")
    return int(bool(differing) and not args.write)


if __name__ == "__main__":
    sys.exit(main())
