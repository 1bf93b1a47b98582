"""The page's style: a phone's width, a dark screen and paper."""

_COLOURS = {
    "light": "#c0392b #e08e0b #1d5fd1 #5b8def #8e6bbf #6b7785 #2e8b57 #b0b8c1 #0f8b8d #a8577e",
    "dark": "#ff7b6b #ffb84d #5b9bff #9cc2ff #c3a6f0 #9aa7b5 #5fd095 #66717d #4fd0d2 #e79bc0",
}
_LIGHT = "--paper:#fff;--card:#f6f7f9;--ink:#1b2430;--soft:#5a6673;--rule:#dde2e8;--good:#1c7c45;--bad:#b3261e"
_DARK = "--paper:#12161c;--card:#1b212a;--ink:#e6eaf0;--soft:#a0acb9;--rule:#323b47;--good:#5fd095;--bad:#ff7b6b"


def _palette(name: str) -> str:
    return ";".join(f"--c{index}:{colour}" for index, colour in enumerate(_COLOURS[name].split()))


_CURVES = "".join(
    f".line.c{i}{{stroke:var(--c{i})}}.band.c{i},.area.c{i},.dot.c{i},.spike.c{i}{{fill:var(--c{i})}}"
    f".b{i}{{background:var(--c{i})}}"
    for i in range(10)
)

STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT};{_palette("light")}}}
@media (prefers-color-scheme:dark){{@media screen{{:root{{{_DARK};{_palette("dark")}}}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}}
main{{max-width:1240px;margin:0 auto;padding:12px 16px 40px}}
h1{{font-size:1.5rem;margin:.4em 0;overflow-wrap:anywhere}}
h2{{font-size:1.15rem;margin:1.4em 0 .5em;overflow-wrap:anywhere;break-after:avoid}}
.verdict{{background:var(--card);border-left:4px solid var(--c2);padding:8px 12px;margin:.6em 0;overflow-wrap:anywhere}}
.facts{{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,165px),1fr));gap:6px 16px;margin:1em 0}}
.facts dt{{color:var(--soft);font-size:.8rem}}
.facts dd{{margin:0;font-weight:600;overflow-wrap:anywhere}}
.bar{{display:flex;height:22px;border-radius:4px;overflow:hidden;margin:.4em 0}}
td:has(>.meter){{width:30%;min-width:80px}}
.meter{{display:block;height:1em;border-radius:2px;min-width:1px}}
.scroll{{overflow-x:auto}}
table{{border-collapse:collapse;width:100%;font-size:.87rem}}
th,td{{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--rule);vertical-align:top}}
td{{overflow-wrap:break-word}}
th,td:first-child:not(:last-child){{white-space:nowrap}}
th{{color:var(--soft);font-weight:600}}
.n{{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}}
i{{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:6px}}
i.dash{{height:0;border-top:2px dashed var(--bad);border-radius:0;vertical-align:middle}}
ul{{list-style:none;padding:0;margin:.4em 0;font-size:.85rem}}
.met b{{color:var(--good)}}
.missed b{{color:var(--bad)}}
.charts,.pictures{{display:grid;gap:14px;margin:14px 0}}
.charts,.pictures{{grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr))}}
figure{{margin:0;background:var(--card);border-radius:8px;padding:10px 12px;min-width:0;break-inside:avoid}}
figcaption{{font-weight:600;margin-bottom:4px;overflow-wrap:anywhere}}
figcaption small{{color:var(--soft);font-weight:400}}
figure p,section p{{color:var(--soft);font-size:.8rem;margin:.3em 0}}
svg{{display:block;width:100%;height:auto}}
svg text{{fill:var(--soft);font:11px system-ui,sans-serif}}
.grid{{stroke:var(--rule);fill:none}}
.limit{{stroke:var(--bad);stroke-width:1.5;stroke-dasharray:5 4;fill:none}}
.line{{fill:none;stroke-width:1.6;stroke-linejoin:round}}
.band{{opacity:.25}}
img{{max-width:100%;height:auto;display:block;background:#000}}
details{{margin:1em 0}}
summary{{cursor:pointer;font-weight:600}}
summary,li{{overflow-wrap:anywhere}}
pre{{background:var(--card);padding:10px;overflow-x:auto;font-size:.8rem}}
footer{{color:var(--soft);font-size:.8rem;margin-top:2em;overflow-wrap:anywhere}}
{_CURVES}
@media (max-width:600px){{
table{{font-size:.8rem}}
th,td{{padding-right:7px}}
th,td:first-child:not(:last-child){{white-space:normal}}
td:first-child:not(:last-child){{min-width:7em}}
.bar+.scroll :is(th,td):nth-child(2){{display:none}}
}}
@media print{{
main{{max-width:none;padding:0}}
.charts{{grid-template-columns:1fr 1fr}}
tr{{break-inside:avoid}}
.bar span,.meter,i,figure{{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
.scroll{{overflow:visible}}
pre{{white-space:pre-wrap;columns:2}}
details::details-content{{content-visibility:visible;block-size:auto}}
summary{{list-style:none}}
}}
"""
