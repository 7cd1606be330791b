"""Looks and sorting of the page of a dump's analysis."""

from __future__ import annotations

STYLE = """
:root { --ink: #1b1f24; --dim: #57606a; --ground: #fff; --card: #f6f8fa; --line: #d0d7de;
  --link: #0550ae; --fail: #b42318; --warn: #8a4b00; --info: #57606a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9aa4af; --ground: #0d1117; --card: #161b22; --line: #30363d;
    --link: #79b8ff; --fail: #ff8f85; --warn: #f0b35c; --info: #9aa4af; }
  img { filter: brightness(.92); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1840px; margin: 0 auto; padding: 16px clamp(12px, 3vw, 40px) 64px; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .4em 0 .2em; }
h2 { font-size: 1.2rem; margin: 1.8em 0 .6em; border-bottom: 1px solid var(--line); }
.name, figcaption, td, th, li { overflow-wrap: anywhere; }
.about, .empty, figcaption span { color: var(--dim); }
a { color: var(--link); }
a:focus-visible, button:focus-visible, .scroll:focus-visible { outline: 3px solid var(--link); }
nav { display: flex; flex-wrap: wrap; gap: 6px 8px; margin: 1.2em 0; }
nav a { padding: 3px 10px; border: 1px solid var(--line); border-radius: 14px;
  text-decoration: none; background: var(--card); }
nav small { color: var(--dim); }
ul.findings { list-style: none; padding: 0; margin: 0; max-width: 110ch; }
ul.findings li { display: flex; gap: 10px; padding: 6px 10px; margin: 4px 0;
  border-left: 4px solid var(--info); background: var(--card); }
ul.findings b { flex: 0 0 4.2em; color: var(--info); }
ul.findings .fail { border-color: var(--fail); } ul.findings .fail b { color: var(--fail); }
ul.findings .warn { border-color: var(--warn); } ul.findings .warn b { color: var(--warn); }
.figures { display: grid; gap: 18px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 620px), 1fr)); align-items: start; }
figure { margin: 0; padding: 10px; border: 1px solid var(--line); border-radius: 8px;
  background: var(--card); }
main > figure { max-width: 1450px; }
figcaption { margin-bottom: 8px; }
figcaption b { display: block; font-weight: 600; }
@media (min-width: 900px) { figcaption b { position: absolute; width: 1px; height: 1px;
  overflow: hidden; clip-path: inset(50%); } }
img { display: block; max-width: 100%; height: auto; margin: 0 auto; background: #fff;
  border-radius: 4px; }
.scroll { overflow-x: auto; max-height: 36rem; overflow-y: auto; border: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
th, td { padding: 4px 10px; border-bottom: 1px solid var(--line); vertical-align: top;
  min-width: 5.5rem; }
tbody th { font-weight: normal; min-width: 13rem; }
td.text:nth-child(2) { min-width: 12rem; }
.text { text-align: left; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
thead th { position: sticky; top: 0; background: var(--card); }
thead button { all: unset; cursor: pointer; font-weight: 600; }
thead button:focus-visible { outline: 3px solid var(--link); }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
@media print { nav, .scroll { max-height: none; } figure { break-inside: avoid; } }
"""

SCRIPT = """
'use strict';
for (const table of document.querySelectorAll('table.sortable')) {
  const heads = [...table.tHead.rows[0].cells];
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.key === undefined ? cell.textContent : cell.dataset.key;
  };
  heads.forEach((head, column) => head.querySelector('button').addEventListener('click', () => {
    const down = head.getAttribute('aria-sort') !== 'descending';
    heads.forEach(other => other.removeAttribute('aria-sort'));
    head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
    const number = head.classList.contains('number');
    const value = text => text === 'inf' ? Infinity : text === '-inf' ? -Infinity : Number(text);
    const rows = [...table.tBodies[0].rows];
    rows.sort((a, b) => {
      const x = key(a, column), y = key(b, column);
      if (!number) return down ? y.localeCompare(x) : x.localeCompare(y);
      const u = value(x), v = value(y);
      if (Number.isNaN(u) || Number.isNaN(v)) return Number.isNaN(u) - Number.isNaN(v);
      return down ? (v > u) - (v < u) : (u > v) - (u < v);
    });
    table.tBodies[0].append(...rows);
  }));
}
"""
