"""The style sheet of ``report.html``: system fonts, light and dark."""

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1c1e22; --faint: #666d76; --line: #e2e5e9; --panel: #f6f7f9;
  --accent: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15171a; --ink: #e7e9ec; --faint: #9aa1ab; --line: #2c3036; --panel: #1e2125; --accent: #56b4e9; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 48px 24px 96px; }
h1 { font-size: 2rem; line-height: 1.2; margin: 0 0 8px; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 0 0 16px; padding-top: 20px; border-top: 1px solid var(--line); }
section { margin-top: 44px; }
p { margin: 12px 0 0; }
.lead { font-size: 1.05rem; color: var(--faint); max-width: 75ch; }
.faint { color: var(--faint); font-size: 0.92rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin-top: 12px; }
.card { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 12px 16px;
  display: flex; flex-direction: column; }
.card span, .card small { color: var(--faint); font-size: 0.86rem; }
.card strong { font-size: 1.4rem; font-weight: 650; font-variant-numeric: tabular-nums; }
.large .card strong { font-size: 2.4rem; line-height: 1.2; }
.large .card:first-child strong { color: var(--accent); }
figure { margin: 0; background: #ffffff; border: 1px solid var(--line); border-radius: 10px; padding: 12px; }
img { display: block; width: 100%; height: auto; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 7px 12px; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: var(--faint); font-weight: 500; font-size: 0.86rem; }
tbody th { font-weight: 500; }
.bar { width: 45%; }
.bar i { display: block; height: 8px; border-radius: 4px; background: var(--accent); }
.facts th { width: 1%; color: var(--faint); vertical-align: top; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
summary { cursor: pointer; }
pre { background: var(--panel); border: 1px solid var(--line); border-radius: 10px; padding: 16px; overflow-x: auto;
  font: 13px/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
@media print { main { padding: 0; } section { break-inside: avoid; } }
"""
