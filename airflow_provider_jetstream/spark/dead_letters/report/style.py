"""How the report looks: by the reader's preference light or dark, on screen and on paper."""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --ink: #1b1f24; --soft: #59636e; --line: #d9dee3;
  --link: #0757b8; --s0: #2f6fb5; --s1: #d9822b; --s2: #2a9d8f; --s3: #b5476f; --s4: #8a7f2e; --s5: #6b7785; }
@media (prefers-color-scheme: dark) { :root { --paper: #14171b; --card: #1d2127; --ink: #e4e8ec; --soft: #9ba6b1;
  --line: #343b43; --link: #7db4f2; --s0: #5b9bdf; --s1: #e6a15c; --s2: #4fbfb0; --s3: #dd7aa0; --s4: #b9ad55;
  --s5: #97a3b0; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 15px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 1.6rem; margin: 0 0 4px; }
h2 { font-size: 1.05rem; margin: 0 0 8px; }
a { color: var(--link); }
.about { color: var(--soft); margin: 0 0 4px; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 12px; margin: 16px 0; }
.figures div { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 10px 14px; }
dt { color: var(--soft); font-size: .85rem; }
dd { margin: 0; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 14px 16px;
  min-width: 0; }
.grid { display: grid; grid-template-columns: 1fr 1fr; gap: 16px; margin-top: 16px; align-items: start; }
.wide { grid-column: 1 / -1; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; list-style: none; margin: 0 0 8px; padding: 0; }
.mark { width: 12px; height: 12px; margin-right: 6px; }
.trend { display: block; width: 100%; height: auto; }
.trend text { fill: var(--soft); font: 12px system-ui, sans-serif; }
.trend .grid { stroke: var(--line); stroke-width: 1; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; }
th { color: var(--soft); font-weight: 500; font-size: .85rem; text-align: left; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td { overflow-wrap: anywhere; }
.short { white-space: nowrap; }
tbody tr:last-child td { border-bottom: 0; }
td.count, th.count { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.count { text-align: right; width: 1%; }
td.share { width: 90px; min-width: 70px; padding-top: 10px; }
.bar { display: block; width: 100%; height: 10px; }
.second, .rest td { color: var(--soft); }
.second { font-size: .85rem; }
.s0 { fill: var(--s0); } .s1 { fill: var(--s1); } .s2 { fill: var(--s2); }
.s3 { fill: var(--s3); } .s4 { fill: var(--s4); } .s5 { fill: var(--s5); }
@media (max-width: 760px) { .grid { grid-template-columns: 1fr; } }
@media print { section { break-inside: avoid; } }
"""
