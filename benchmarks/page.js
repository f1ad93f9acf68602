"use strict";

const GIB = 2 ** 30;
const tip = document.getElementById("tip");

// One path for all spans of a kind: thousands of them stay fast. Lines would be a path for each.
function tracesOf({kinds, spans}) {
  const traces = kinds.map(({colour}) => ({
    type: "scatter", mode: "none", fill: "toself", fillcolor: colour, hoverinfo: "skip", x: [], y: [],
  }));
  for (const [row, start, end, kind] of spans) {
    traces[kind].x.push(start, end, end, start, start, null);
    traces[kind].y.push(row - 0.36, row - 0.36, row + 0.36, row + 0.36, row - 0.36, null);
  }
  return traces;
}

function describe({kinds}, [, start, end, kind, nbytes], label) {
  const lines = [`${kinds[kind].name} (${label})`, `${start.toFixed(2)} to ${end.toFixed(2)} ms: ${(end - start).toFixed(2)} ms`];
  if (nbytes) {
    const rate = end > start ? `, ${(nbytes / GIB / ((end - start) / 1000)).toFixed(2)} GiB/s` : "";
    lines.push(`${(nbytes / 2 ** 20).toFixed(2)} MiB${rate}`);
  }
  return lines.join("\n");
}

function showSpansUnderPointer(div, timeline) {
  const hide = () => { tip.hidden = true; };
  div.addEventListener("pointerleave", hide);
  div.addEventListener("pointermove", (event) => {
    const {xaxis, yaxis} = div._fullLayout;
    const box = div.querySelector(".nsewdrag").getBoundingClientRect();
    const x = xaxis.p2d(event.clientX - box.left), y = yaxis.p2d(event.clientY - box.top);
    const slack = Math.abs(xaxis.p2d(1) - xaxis.p2d(-1));
    const found = timeline.spans.find(([row, start, end]) => Math.abs(y - row) < 0.5 && start - slack <= x && x <= end + slack);
    if (!found) return hide();
    tip.textContent = describe(timeline, found, timeline.labels[timeline.rows.indexOf(found[0])]);
    tip.hidden = false;
    const {width, height} = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 4))}px`;
    tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 4))}px`;
  });
}

const charts = JSON.parse(document.getElementById("charts").textContent);
for (const [id, {data, layout, timeline}] of Object.entries(charts)) {
  const div = document.getElementById(id);
  // Fingers scroll the page.
  if (matchMedia("(pointer: coarse)").matches) layout.dragmode = false;
  Plotly.newPlot(div, timeline ? tracesOf(timeline) : data, layout, {responsive: true, displayModeBar: false})
    .then(() => { if (timeline) showSpansUnderPointer(div, timeline); });
}
// Paper has another width than the window: pictures are scaled to it.
addEventListener("beforeprint", () => {
  for (const svg of document.querySelectorAll(".main-svg")) {
    svg.setAttribute("viewBox", `0 0 ${svg.getAttribute("width")} ${svg.getAttribute("height")}`);
  }
});
addEventListener("afterprint", () => {
  for (const svg of document.querySelectorAll(".main-svg")) svg.removeAttribute("viewBox");
});
