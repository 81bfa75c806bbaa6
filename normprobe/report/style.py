"""The styles of the HTML report; they touch nothing outside it and follow light or dark mode."""

from __future__ import annotations

_LIGHT = """--np-ink:#1c2024;--np-dim:#667079;--np-line:#e0e4e8;--np-page:#fff;--np-card:#f7f8fa;
--np-blue:#0b6bcb;--np-violet:#9a5bb8;--np-error:#c62828;--np-warning:#a86200;--np-note:#0e7c86;
--np-clean:#2e7d32;"""
_DARK = """--np-ink:#e4e8ec;--np-dim:#98a2ad;--np-line:#343a41;--np-page:#16191d;--np-card:#1e2227;
--np-blue:#64b0f4;--np-violet:#c79bdc;--np-error:#ff7b72;--np-warning:#e8b04b;--np-note:#56c8d2;
--np-clean:#6fcf74;"""

CSS = f"""
.normprobe-report{{{_LIGHT}color:var(--np-ink);font:14px/1.5 system-ui,sans-serif;max-width:860px}}
@media (prefers-color-scheme:dark){{.normprobe-report{{{_DARK}}}}}
body[data-jp-theme-light="true"] .normprobe-report,body.vscode-light .normprobe-report{{{_LIGHT}}}
body[data-jp-theme-light="false"] .normprobe-report,body.vscode-dark .normprobe-report{{{_DARK}}}
.normprobe-page{{margin:0;background:#fff}}
@media (prefers-color-scheme:dark){{.normprobe-page{{background:#16191d}}}}
.normprobe-page .normprobe-report{{margin:0 auto;padding:28px 20px}}
.normprobe-report p{{margin:2px 0}}
.normprobe-report ul{{margin:2px 0 8px;padding-left:20px}}
.normprobe-report code{{font:12.5px/1.5 ui-monospace,monospace;background:none;color:inherit;padding:0;
overflow-wrap:anywhere}}
.normprobe-report .np-dim{{color:var(--np-dim);font-size:13px;font-weight:400}}
.normprobe-report .np-name{{font-size:20px;font-weight:650;overflow-wrap:anywhere}}
.normprobe-report .np-verdict{{display:inline-block;margin:4px 0 6px;padding:1px 12px;border-radius:99px;
border:1.5px solid;font-weight:600}}
.normprobe-report .np-loud{{color:var(--np-warning);font-weight:600}}
.normprobe-report .np-title{{margin:22px 0 6px;font-size:15px;font-weight:650}}
.normprobe-report .np-finding{{margin:8px 0;padding:8px 14px;border-left:4px solid;border-radius:4px;
background:var(--np-card)}}
.normprobe-report .np-finding>*{{color:var(--np-ink)}}
.normprobe-report .np-finding>.np-dim{{color:var(--np-dim)}}
.normprobe-report .np-code{{font-weight:650}}
.normprobe-report .np-error,.normprobe-report .np-error .np-code,.normprobe-report .np-broken-text{{
color:var(--np-error)}}
.normprobe-report .np-warning,.normprobe-report .np-warning .np-code,.normprobe-report .np-unread{{
color:var(--np-warning)}}
.normprobe-report .np-note,.normprobe-report .np-note .np-code{{color:var(--np-note)}}
.normprobe-report .np-clean,.normprobe-report .np-finding>.np-fix{{color:var(--np-clean)}}
.normprobe-report .np-table{{border-collapse:collapse;font-size:13px;display:block;overflow-x:auto}}
.normprobe-report .np-table th,.normprobe-report .np-table td{{padding:2px 14px 2px 0;text-align:right;
font-variant-numeric:tabular-nums;background:none;border:0;white-space:nowrap}}
.normprobe-report .np-table th{{color:var(--np-dim);font-weight:400}}
.normprobe-report .np-table :is(th,td):first-child{{text-align:left;white-space:normal}}
.normprobe-report .np-charts{{display:grid;gap:14px;
grid-template-columns:repeat(auto-fit,minmax(min(380px,100%),1fr))}}
.normprobe-report figure{{margin:0;padding:10px;border:1px solid var(--np-line);border-radius:6px;
background:var(--np-page)}}
.normprobe-report figure>svg{{display:block;width:100%;height:auto}}
.normprobe-report .np-legend span{{margin-right:14px;white-space:nowrap}}
.normprobe-report .np-key{{width:22px;height:8px}}
.normprobe-report .np-grid{{stroke:var(--np-line)}}
.normprobe-report .np-tick{{fill:var(--np-dim);font:13px system-ui,sans-serif}}
.normprobe-report polyline{{fill:none}}
.normprobe-report .np-series{{stroke:var(--np-blue);stroke-width:2}}
.normprobe-report .np-reference{{stroke:var(--np-dim);stroke-width:1.5;stroke-dasharray:5 4}}
.normprobe-report .np-companion{{stroke:var(--np-violet);stroke-width:1.5}}
.normprobe-report .np-point{{fill:var(--np-blue);fill-opacity:0}}
.normprobe-report .np-point:hover,.normprobe-report .np-alone{{fill-opacity:1}}
.normprobe-report .np-broken{{stroke:var(--np-error);stroke-width:2}}
.normprobe-report footer{{margin-top:22px;border-top:1px solid var(--np-line);padding-top:6px}}
"""
