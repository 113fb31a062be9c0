"""The style sheet of a report: light, dark by the system's setting, and always light on paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --text: #1c2430; --muted: #5b6675; --line: #dde2e8;
  --over: #1c243014;
  --c0: #2f6fd0; --c1: #e08a00; --c2: #c4472b; --c3: #a0529e; --c4: #17896b; --c5: #4aa7d8;
  --c6: #8a6d3b; --c7: #a3abb6;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #12161c; --card: #1b2129; --text: #e6eaf0; --muted: #9aa6b5; --line: #323b47;
    --over: #e6eaf01f;
    --c0: #5b9bf3; --c1: #f2ae3d; --c2: #f07a5c; --c3: #cf8acd; --c4: #3fbf99; --c5: #8accf0;
    --c6: #c9a86a; --c7: #6b7583;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 60rem; padding: 2rem 1.25rem 3rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .5rem; }
p { margin: .4rem 0; }
.muted, figcaption, footer { color: var(--muted); font-size: .875rem; overflow-wrap: anywhere; }
.found { background: var(--card); border-left: 4px solid var(--c0); border-radius: 6px;
  padding: .8rem 1.1rem; margin: 1.2rem 0; }
.found ul { margin: .4rem 0 0; padding-left: 1.2rem; }
.found li { margin: .3rem 0; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .7rem; }
dl div { background: var(--card); border-radius: 6px; padding: .6rem .8rem; }
dt { color: var(--muted); font-size: .8rem; }
dd { margin: 0; font-size: 1.15rem; font-variant-numeric: tabular-nums; }
figure { margin: .8rem 0 1.4rem; break-inside: avoid; }
figcaption { margin-bottom: .3rem; }
figcaption b { color: var(--text); font-weight: 600; }
.plot, .table { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 34rem; height: auto; }
svg text { fill: var(--muted); font-size: 11.5px; font-variant-numeric: tabular-nums; }
.grid { stroke: var(--line); stroke-width: 1; fill: none; }
.resumed { stroke: var(--muted); stroke-width: 1.5; stroke-dasharray: 4 3; fill: none; }
.line { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
.area { shape-rendering: crispEdges; }
.over { fill: transparent; }
.over:hover { fill: var(--over); }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; }
.keys i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px;
  margin-right: .35rem; }
table { border-collapse: collapse; width: 100%; font-size: .875rem;
  font-variant-numeric: tabular-nums; }
th { color: var(--muted); font-weight: 500; vertical-align: bottom; }
th, td { padding: .3rem .6rem; text-align: right; border-bottom: 1px solid var(--line); }
th:nth-child(2), td:nth-child(2), th:nth-child(3), td:nth-child(3) { text-align: left; }
td.gone { color: var(--muted); }
td { white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; }
footer { margin-top: 2rem; }
@media print {
  @page { margin: 15mm; }
  body { max-width: none; padding: 0; font-size: 10.5pt; print-color-adjust: exact;
    -webkit-print-color-adjust: exact; }
  svg { min-width: 0; }
  table { font-size: 7.5pt; }
  th, td { padding: .15rem .3rem; }
  tr { break-inside: avoid; }
  h2 { break-after: avoid; }
}
""" + "".join(
    f".area.c{n}, circle.c{n}, i.c{n} {{ fill: var(--c{n}); background: var(--c{n}); }}\n"
    f".line.c{n} {{ stroke: var(--c{n}); }}\n"
    for n in range(8)
)
