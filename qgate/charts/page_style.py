"""The looks of all pages: one set of colors, light and dark, from a phone to a wide screen.

Pages and the plots inside them take every color from the custom properties, so that a plot drawn
as SVG follows the page into dark mode and onto paper. Colors of text keep a contrast of 4.5 to 1.
"""

from __future__ import annotations

# Steps of a heat map from the smallest error to the largest, each with the color of its text.
HEAT_LIGHT = (
    ("#f1f6fb", "#10202f"), ("#dce9f5", "#10202f"), ("#c2d9ee", "#10202f"),
    ("#9dc4e3", "#10202f"), ("#6fa8d3", "#0a1622"), ("#3375ad", "#ffffff"),
    ("#1f5d97", "#ffffff"), ("#08386b", "#ffffff"),
)  # fmt: skip
HEAT_DARK = (
    ("#16222e", "#e6edf3"), ("#1b3146", "#e6edf3"), ("#204463", "#e6edf3"),
    ("#265a86", "#ffffff"), ("#2f71a9", "#ffffff"), ("#6aa9dc", "#0a1622"),
    ("#a3cdf0", "#0a1622"), ("#dceefc", "#0a1622"),
)  # fmt: skip


def _steps(steps: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"--h{i}: {back}; --t{i}: {text};" for i, (back, text) in enumerate(steps))


def heat_colors(within: str = "") -> str:
    """Rules that color the cells and the legend of heat maps."""
    return "\n".join(
        f"{within}table.heat td.h{i}, {within}.legend .h{i} "
        f"{{ background: var(--h{i}); color: var(--t{i}); }}"
        for i in range(len(HEAT_LIGHT))
    )


_LIGHT = """--ink: #1b1f24; --dim: #57606a; --paper: #fff; --card: #f6f8fa; --line: #d0d7de;
  --link: #0550ae; --fail: #b42318; --warn: #8a4b00; --good: #116329; --info: #57606a;
  --mark: #fff3c4;"""
# For a fragment on a page that is not ours, and stays light in the dark.
LIGHT_COLORS = f"{_LIGHT} {_steps(HEAT_LIGHT)}"

STYLE = (
    f"""
:root {{ color-scheme: light dark; {_steps(HEAT_LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_steps(HEAT_DARK)} }} }}
@media print {{ :root {{ color-scheme: light; {_steps(HEAT_LIGHT)} }} }}
{heat_colors()}
:root {{ {_LIGHT} }}
"""
    + """
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9aa4af; --paper: #0d1117; --card: #161b22; --line: #30363d;
    --link: #79b8ff; --fail: #ff8f85; --warn: #f0b35c; --good: #6fd584; --info: #9aa4af;
    --mark: #4a3b0b; }
  img { filter: brightness(.92); }
}
* { box-sizing: border-box; }
[hidden] { display: none !important; }
html { scroll-padding-top: 8px; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1840px; margin: 0 auto; padding: 16px clamp(12px, 3vw, 40px) 64px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .4em 0 .2em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 1.8em 0 .6em; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.2em 0 .4em; overflow-wrap: anywhere; }
.name, figcaption, li, p, dd, code { overflow-wrap: anywhere; }
td, th { overflow-wrap: break-word; }
.about, .empty, figcaption span { color: var(--dim); }
.fail { color: var(--fail); } .warn { color: var(--warn); } .good { color: var(--good); }
.unseen { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%);
  white-space: nowrap; }
a { color: var(--link); }
:is(a, button, input, select, summary, .scroll, pre):focus-visible {
  outline: 3px solid var(--link); outline-offset: 1px; }
a.skip { position: absolute; left: -999rem; background: var(--card); padding: 6px 12px; }
a.skip:focus { left: 8px; top: 8px; z-index: 9; }
nav { display: flex; flex-wrap: wrap; gap: 6px 8px; margin: 1.2em 0; }
nav a { padding: 3px 10px; border: 1px solid var(--line); border-radius: 14px;
  text-decoration: none; background: var(--card); }
nav small { color: var(--dim); }
ul.findings { list-style: none; padding: 0; margin: 0; max-width: 110ch; }
ul.findings li { display: flex; gap: 10px; padding: 6px 10px; margin: 4px 0;
  border-left: 4px solid var(--info); background: var(--card); color: var(--ink); }
ul.findings b { flex: 0 0 auto; min-width: 4.2em; color: var(--info); }
ul.findings .fail { border-color: var(--fail); } ul.findings .fail b { color: var(--fail); }
ul.findings .warn { border-color: var(--warn); } ul.findings .warn b { color: var(--warn); }
.figures { display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 620px), 1fr)); align-items: start; }
figure { margin: 0; padding: 10px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); min-width: 0; }
main > figure { max-width: 1450px; }
figcaption { margin-bottom: 8px; }
figcaption b { display: block; font-weight: 600; }
@media (min-width: 900px) { figcaption b { position: absolute; width: 1px; height: 1px;
  overflow: hidden; clip-path: inset(50%); } }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff;
  border-radius: 4px; }
svg.plot { display: block; max-width: 100%; height: auto; margin: 0 auto; }
.scroll { overflow: auto; max-height: 36rem; border: 1px solid var(--line); position: relative; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  min-width: 5.5rem; }
tbody th { font-weight: normal; min-width: 13rem; }
td.text:nth-child(2) { min-width: 12rem; }
.text { text-align: left; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
#comparison td.text:nth-child(2) { min-width: 0; }
#trend .scroll { margin-top: 18px; }
#trend .figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); }
thead th { position: sticky; top: 0; background: var(--card); z-index: 1; }
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:focus-visible { outline: 3px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
.filters { display: flex; flex-wrap: wrap; gap: 8px 14px; align-items: end; margin: 0 0 8px; }
.filters label { display: grid; font-size: .85rem; color: var(--dim); }
.filters :is(input, select, button) { font: inherit; font-size: .95rem; color: var(--ink);
  background: var(--paper); border: 1px solid var(--dim); border-radius: 6px; padding: 4px 8px;
  max-width: min(22rem, 80vw); min-height: 2.2rem; }
.filters button { cursor: pointer; background: var(--card); }
.filters output { padding: 5px 0; font-weight: 600; }
@media print { nav, .filters, a.skip { display: none; }
  :root { --ink: #000; --dim: #444; --paper: #fff; --card: #fff; --line: #bbb; --link: #000;
    --fail: #b42318; --warn: #8a4b00; --good: #116329; --info: #444; --mark: #fff; }
  html { font-size: 75%; } body { font-size: 11px; } main { padding: 0; max-width: none; }
  .scroll { max-height: none !important; overflow: visible; border: 0; }
  thead th { position: static; } thead { display: table-header-group; }
  /* A box of its own keeps Chromium from repeating heads on every page. */
  thead button { display: contents; }
  tr, figure { break-inside: avoid; } h1, h2, h3, summary { break-after: avoid; }
  a { text-decoration: none; }
  details:not(.cases)::details-content { content-visibility: visible; } }
"""
)
