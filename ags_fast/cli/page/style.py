"""The look of the page, light and dark. Colours of text have a contrast of 4.5 at least (WCAG AA)."""

STYLE = """
:root { color-scheme: light dark; --paper: #faf9f6; --card: #fff; --ink: #1c2230; --soft: #565f6e; --line: #dedad2;
  --link: #2459a8; --good: #1a7341; --warn: #8a5200; --bad: #b02318; --code: #f3f1ec; --tint: #e9eff8;
  --mono: ui-monospace, "SF Mono", "Cascadia Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
@media (prefers-color-scheme: dark) { :root { --paper: #13161b; --card: #1a1e25; --ink: #e7eaef; --soft: #a5afbc;
  --line: #323a46; --link: #8fb8f6; --good: #7fd5a2; --warn: #f0bf66; --bad: #ff9f95; --code: #11141a;
  --tint: #202c3e; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 1rem/1.55 system-ui, -apple-system, "Segoe UI",
  Roboto, "Noto Sans", "DejaVu Sans", sans-serif; font-variant-numeric: tabular-nums; }
main { max-width: 70rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }
h1 { margin: 0; font-size: clamp(1.6rem, 4.5vw, 2.3rem); line-height: 1.15; letter-spacing: -.02em;
  overflow-wrap: anywhere; text-wrap: balance; }
h2 { margin: 3rem 0 .25rem; font-size: 1.3rem; line-height: 1.25; letter-spacing: -.01em; }
h2 + p { margin-top: 0; }
p, li { overflow-wrap: anywhere; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
.lede, .note, .soft { color: var(--soft); }
.lede { margin-top: .6rem; overflow-wrap: anywhere; }
.eyebrow { margin: 0 0 .4rem; color: var(--soft); font-size: .8rem; font-weight: 600; letter-spacing: .09em;
  text-transform: uppercase; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem;
  margin: 1.75rem 0 0; }
.facts div { padding: .8rem 1rem; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.facts dt { color: var(--soft); font-size: .85rem; line-height: 1.3; }
.facts dd { overflow-wrap: anywhere;
  margin: .1rem 0 0; font-size: 1.45rem; font-weight: 600; line-height: 1.2; letter-spacing: -.02em; }
.facts small { display: block; margin-top: .2rem; color: var(--soft); font-size: .8rem; font-weight: 400;
  letter-spacing: 0; }
.card, .scroll, figure { background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
.scroll { overflow-x: auto; margin: .9rem 0; }
.scroll:focus-visible, summary:focus-visible, pre:focus-visible { outline: 2px solid var(--link); outline-offset: 2px; }
table { width: 100%; border-collapse: collapse; font-size: .9rem; line-height: 1.4; }
caption { padding: .8rem 1rem .5rem; color: var(--soft); text-align: left; font-size: .85rem; }
th, td { padding: .55rem .75rem; border-top: 1px solid var(--line); text-align: left; vertical-align: top; }
th:first-child, td:first-child { padding-left: 1rem; }
thead th { color: var(--soft); font-size: .8rem; font-weight: 600; white-space: nowrap; }
tbody th { font-weight: 500; }
.num { text-align: right; white-space: nowrap; }
.tight { white-space: nowrap; }
.wide { min-width: 17rem; }
.id { font-family: var(--mono); font-size: .92em; overflow-wrap: anywhere; }
th .id { display: inline-block; min-width: 6rem; max-width: 16rem; } th .key { min-width: 12.2rem; }
td .id { display: inline-block; min-width: 3.5rem; }
.sub { display: block; color: var(--soft); font-size: .85em; font-weight: 400; }
.good, .warn, .bad { font-weight: 600; white-space: nowrap; }
.good { color: var(--good); } .warn { color: var(--warn); } .bad { color: var(--bad); }
figure { margin: .9rem 0; padding: .9rem 1rem .6rem; }
figure svg { display: block; width: 100%; height: auto; }
figcaption { margin-top: .6rem; color: var(--soft); font-size: .85rem; line-height: 1.45; }
.narrow { display: none !important; }
svg text { fill: var(--ink); font-family: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
svg .name { font-family: var(--mono); font-weight: 500; }
svg .what, svg .head { fill: var(--soft); }
svg .head { font-weight: 600; }
svg .box { fill: var(--paper); stroke: var(--line); }
svg .stripe { fill: var(--soft); } svg .active .stripe { fill: var(--link); }
svg .lapsed .stripe { fill: var(--warn); } svg .missing .stripe { fill: var(--bad); }
svg .way { fill: none; stroke: var(--soft); stroke-opacity: .65; } svg .way.active { stroke: var(--link);
  stroke-opacity: .8; }
.rules { display: flex; flex-wrap: wrap; gap: .25rem 2rem; margin: .5rem 0 1rem; }
.rules dt { color: var(--soft); font-size: .85rem; } .rules dd { margin: 0; font-weight: 500; }
td details { margin: .35rem 0 0; background: none; border: 0; } td details > summary { padding: 0; color: var(--link);
  font-weight: 500; } td details > :not(summary) { margin-left: 0; margin-right: 0; }
.meter { display: block; width: 6rem; height: .5rem; margin-top: .35rem; }
.meter .all { fill: var(--line); } .meter .part { fill: var(--link); } .meter .over { fill: var(--warn); }
.ages .bar { fill: var(--link); } .ages .late { fill: var(--warn); } .ages .rest { fill: var(--soft); }
.ages .limit { stroke: var(--bad); stroke-width: 2; stroke-dasharray: 6 4; } .ages .axis { stroke: var(--line); }
ol.steps { margin: 1rem 0; padding: 0; list-style: none; counter-reset: step; }
ol.steps > li { position: relative; margin: .75rem 0; padding: .9rem 1rem .9rem 3.1rem; background: var(--card);
  border: 1px solid var(--line); border-radius: .6rem; counter-increment: step; }
ol.steps > li::before { content: counter(step); position: absolute; left: 1rem; top: .9rem; width: 1.5rem;
  height: 1.5rem; border-radius: 50%; background: var(--tint); color: var(--link); font-size: .85rem; font-weight: 700;
  line-height: 1.5rem; text-align: center; }
ol.steps p { margin: 0; max-width: none; overflow-wrap: anywhere; }
pre { margin: .6rem 0 .4rem; padding: .6rem .8rem; overflow-x: auto; background: var(--code); border: 1px solid
  var(--line); border-radius: .4rem; font: .85rem/1.5 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere; }
pre code { font: inherit; user-select: all; -webkit-user-select: all; }
details { margin: .6rem 0; background: var(--card); border: 1px solid var(--line); border-radius: .6rem; }
details > summary { padding: .7rem 1rem; cursor: pointer; font-weight: 600; }
details > :not(summary) { margin-left: 1rem; margin-right: 1rem; }
details ol.steps > li { background: var(--paper); }
.alert { padding: .8rem 1rem; border: 1px solid var(--bad); border-radius: .6rem; background: var(--card); }
.alert p { margin: 0; } .alert .bad { white-space: normal; } .alert li { overflow-wrap: anywhere; }
ul { max-width: 46rem; padding-left: 1.2rem; } li { margin: .35rem 0; }
@media (max-width: 60rem) { table, caption, tbody, tr, th, td { display: block; } thead { position: absolute;
  width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap; }
  tbody tr { padding: .7rem 1rem; border-top: 1px solid var(--line); }
  tbody th, tbody td, tbody th:first-child { padding: .1rem 0;
  border: 0; } tbody th { margin-bottom: .25rem; font-weight: 600; } td:empty { display: none; }
  tbody td { display: grid; grid-template-columns: 8rem minmax(0, 1fr); gap: 0 .75rem;
  text-align: left; white-space: normal; overflow-wrap: anywhere; }
  tbody td.num, tbody td.tight, td .good, td .warn { text-align: left; white-space: normal; }
  tbody td > * { grid-column: 2; } td::before { grid-column: 1; grid-row: 1 / span 9; color: var(--soft);
  content: attr(data-label); } th .id { max-width: none; } .wide { min-width: 0; } .scroll { overflow: visible; } }
@media (min-width: 44.01rem) and (max-width: 60rem) { tbody tr { display: grid; grid-template-columns: 1fr 1fr;
  gap: 0 1.5rem; } tbody th, tbody td.wide, tbody td:last-child { grid-column: 1 / -1; } }
@media (max-width: 44rem) { main { padding: 1.5rem 1rem 3rem; } h2 { margin-top: 2.25rem; }
  .facts { grid-template-columns: 1fr 1fr; gap: .5rem; } .facts div { padding: .65rem .8rem; }
  .facts dd { font-size: 1.3rem; } figure { padding: .6rem .5rem; } figcaption { padding: 0 .3rem; }
  .broad { display: none !important; } .narrow { display: block !important; }
  ol.steps > li { padding-left: 1rem; } ol.steps > li::before { position: static; display: block;
  margin-bottom: .4rem; } }
@media print { :root { --paper: #fff; } .scroll { overflow: visible; } details:not([open]) > * { display: block; } }
"""
