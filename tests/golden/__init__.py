"""Golden outputs: what every command prints and writes on fixed inputs, pinned as text.

`python -m tests.golden` runs the commands and shows which line of which file is different now, old
and new; `python -m tests.golden --write` stores what is written now, and names choose groups or
cases (`sweep-`, `draw`, `suites`). `test_golden.py` is the same under pytest, a test per case.
A change of an output is right or wrong; accept it only after reading the difference.

What is in here:
  cases.py      groups of commands, each group in a process and a folder of its own
  inputs.py     a zoo of tensors, two dumps with planted faults, a program to collect from
  work.py       runs a group; running.py starts it and compares; comparing.py decides what differs
  files.py, summaries.py, pages.py, pictures.py, helping.py   turn outputs into text that holds still
  stored/CASE/  console.txt (command, output, errors, exit status, names of the files it wrote) and
                a text for each file that is pinned

How outputs become text. Times, versions, hashes, names of processors and the folder of the run are
replaced. JSON and CSV with long lists are summarized: the first and last row, and of each column
the extremes, the mean magnitude, the same weighted by position, and the texts that occur. A page is
its words and the numbers of its inline SVG; a picture is the data drawn: texts, scales, limits,
lines, bars, images, collections and their colors. It is taken from the figure just before it would
be rendered. Records of gates (`results.jsonl`) are stored as they are, and `qgate report` reads
the stored ones, so that a change of a number there shows once in its cause and a change of a page
by itself.

How texts are compared. Numbers with a point or an exponent are equal within 1e-6 of the larger;
those in at most six digits must be written the same, and so must integers and words.

Arithmetic. Groups run with the lowest arithmetic that all x86-64 machines share (no AVX, no fused
products, one thread), since another order of sums moves a result by an ulp and a quantizer turns
an ulp into a step. `--default-arithmetic` shows how far this machine is from it.
"""
