"""Write conformance vectors of a format: every code, and casts of hard values, in one .npz file.

  qgate show vectors fp8_e4m3                 write fp8_e4m3.npz here
  qgate show vectors mxfp4 --output v.npz     another file

For projects that do not depend on Python: the file is a zip of .npy arrays without pickles, and the
array `meta` has what they are as JSON. The same version writes the same bytes.
"""

from __future__ import annotations

import argparse
import io
import zipfile
from pathlib import Path

from qgate.text.printing import print_text

_DATE = (1980, 1, 1, 0, 0, 0)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("format", metavar="FORMAT", help="a format or alias, such as mxfp8")
    parser.add_argument(
        "--output", "-o", type=Path, metavar="FILE", help="file to write (default FORMAT.npz)"
    )


def run(args: argparse.Namespace) -> int:
    import numpy as np

    from qgate import formats
    from qgate.formats.vectors import conformance_vectors
    from qgate.storage.files import replacing

    fmt = formats.get(args.format)
    file = args.output or Path(f"{fmt.name}.npz")
    arrays = conformance_vectors(fmt)
    with replacing(file) as neighbor, zipfile.ZipFile(neighbor, "w") as archive:
        for name, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, np.ascontiguousarray(array), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", _DATE), data.getvalue())
    codes = f"{len(arrays['codes'])} codes, " if "codes" in arrays else ""
    casts = sum(name.endswith("_codes") and name != "scale_codes" for name in arrays)
    print_text(f"wrote {file}: {codes}{len(arrays['cast_input'])} casts under {casts} conventions")
    return 0
