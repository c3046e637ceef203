// Elements, numbers, scales and tooltips, which all parts of the page share.
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";

function set(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  for (const child of children.flat()) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (name, attributes, ...children) => set(document.createElement(name), attributes, children);
const draw = (name, attributes, ...children) => set(document.createElementNS(SVG, name), attributes, children);
const clear = (node) => (node.replaceChildren(), node);
const range = (n) => Array.from({ length: n }, (_, i) => i);
const plural = (n, word) => `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;

// Three significant digits, without an exponent where people would not write one.
function digits(value, most = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6 || size < 1e-4) return value.toExponential(2);
  if (size >= 10 ** (most - 1)) return Math.round(value).toLocaleString("en");
  return value.toFixed(Math.max(0, most - 1 - Math.floor(Math.log10(size))));
}
const trimmed = (value) => (Math.abs(value) >= 1e5 || (value && Math.abs(value) < 1e-4)
  ? value.toExponential(0) : String(Number(value.toPrecision(4))));
const seconds = (s) => (s >= 7200 ? `${digits(s / 3600)} h` : s >= 120 ? `${digits(s / 60)} min` : `${digits(s)} s`);
function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  while (n >= 1024 && at < units.length - 1) { n /= 1024; at += 1; }
  return `${digits(n)} ${units[at]}`;
}
// A ratio of times, as the texts from Python show it.
const times = (ratio) => `${ratio >= 0.1 && ratio < 9.995 ? ratio.toFixed(2) : Number(ratio.toPrecision(3))}x`;
// A number that is still a bound: rounded down or up, not to the nearest.
function bound(value, most, way = Math.floor) {
  if (!value) return value;
  const step = 10 ** (Math.floor(Math.log10(Math.abs(value))) - most + 1), place = value / step;
  return (Math.abs(place - Math.round(place)) < 1e-6 ? Math.round(place) : way(place)) * step;
}
const percent = (share) => `${share > 0 && share < 0.01 ? "< 1" : Math.round(100 * share)} %`;
function median(values) {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}
const short = (text, most) => (text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text);

// A scale from values to pixels with its ticks; logarithmic where values span more than a factor of three.
function scale(low, high, from, to, { log = high > 3 * low, count = 5 } = {}) {
  if (!(high > low)) { const pad = Math.abs(low) * 0.05 || 1; low -= pad; high += pad; log = false; }
  log = log && low > 0;
  const f = log ? Math.log : (x) => x;
  const at = (value) => from + ((f(value) - f(low)) / (f(high) - f(low))) * (to - from);
  at.invert = (pixel) => {
    const place = f(low) + ((pixel - from) / (to - from)) * (f(high) - f(low));
    return log ? Math.exp(place) : place;
  };
  at.low = low; at.high = high; at.log = log;
  at.ticks = log ? logTicks(low, high, count) : linearTicks(low, high, count);
  return at;
}
function linearTicks(low, high, count) {
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high * (1 + 1e-12) + 1e-300; n += 1) ticks.push(n * step);
  return ticks;
}
function logTicks(low, high, count) {
  for (const steps of [[1, 1.5, 2, 3, 4, 5, 6, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power += 1)
      for (const step of steps) {
        const tick = step * 10 ** power;
        if (tick >= low * 0.9999 && tick <= high * 1.0001) ticks.push(tick);
      }
    if (ticks.length <= count + 2) return ticks.length > 1 ? ticks : linearTicks(low, high, count);
  }
  const all = range(Math.ceil(Math.log10(high)) - Math.floor(Math.log10(low)) + 1)
    .map((n) => 10 ** (Math.floor(Math.log10(low)) + n)).filter((tick) => tick >= low && tick <= high);
  const every = Math.ceil(all.length / (count + 1));
  return all.filter((_, index) => index % every === 0);
}

const textWidth = (() => {
  const context = document.createElement("canvas").getContext("2d");
  return (text, font = "12px system-ui, sans-serif") => { context.font = font; return context.measureText(text).width; };
})();
const MONO = "12px ui-monospace, SFMono-Regular, Menlo, Consolas, monospace";
function fitted(text, width, font) {
  if (textWidth(text, font) <= width) return text;
  return short(text, Math.max(2, Math.floor((text.length * width) / textWidth(text, font)) - 1));
}
// Many points as one path, which browsers draw far faster than as many circles.
const dots = (points) => points.map(([x, y]) => `M${x.toFixed(1)} ${y.toFixed(1)}h0`).join("");

// The width inside an element's padding.
function roomIn(host) {
  const { paddingLeft, paddingRight } = getComputedStyle(host);
  return host.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
}
function chart(width, height, label) {
  return draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}
// A horizontal line for each tick of the times.
function timeGrid(svg, p, y, left, right, gap) {
  for (const tick of y.ticks) svg.append(draw("line", { x1: left, x2: right, y1: y(tick), y2: y(tick), class: "grid" }),
    draw("text", { x: left - gap, y: y(tick) + 4, "text-anchor": "end", class: "tick", text: p.tick(tick) }));
}
// The axes of a chart of times: the grid, the marks of what is below, and the names of both.
function timeAxes(svg, p, x, y, { left, right, height, name }) {
  timeGrid(svg, p, y, left, right, 8);
  for (const tick of x.ticks) svg.append(draw("line", { x1: x(tick), x2: x(tick), y1: height - 46, y2: height - 41, class: "mark" }),
    draw("text", { x: x(tick), y: height - 27, "text-anchor": "middle", class: "tick", text: trimmed(tick) }));
  svg.append(draw("text", { x: left - 48, y: 14, class: "axis", text: `time of one call (${p.unit[1]})${y.log ? ", logarithmic" : ""}` }),
    draw("text", { x: right, y: height - 7, "text-anchor": "end", class: "axis", text: name }));
}
// The smallest of some times: exactly known, or between a bound and the least that is known.
function leastOf(trials) {
  let low = Infinity, high = Infinity, first = null;
  for (const trial of trials) {
    low = Math.min(low, trial.ms);
    if (trial.kind !== "at least") high = Math.min(high, trial.ms);
    if (faster(trial, first)) first = trial;
  }
  return first && { low, high, first };
}
// Points of trials that were measured to the end, and of those that were stopped early.
function timedDots(svg, points, n) {
  const many = n > 800 ? "dots many" : "dots", of = (name) => dots(points.filter(([, , trial]) => trial.outcome.name === name));
  svg.append(draw("path", { d: of("ok"), class: many }), draw("path", { d: of("slow"), class: `${many} slow` }));
}
// The same data as a table, made when it is opened.
function asTable(head, rows, note = "") {
  const details = el("details", { class: "alt" }, el("summary", { text: "Show as a table" }));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const most = 200;
    details.append(el("div", { class: "scroll" }, el("table", { class: "small" },
      el("thead", {}, el("tr", {}, head.map((text) => el("th", { scope: "col", text })))),
      el("tbody", {}, rows.slice(0, most).map((row) => el("tr", {}, row.map((text, index) =>
        el(index ? "td" : "th", { scope: index ? null : "row", text }))))))));
    const left = rows.length > most ? `The first ${most} of ${rows.length} rows. ${note}` : note;
    if (left) details.append(el("p", { class: "muted", text: left }));
  });
  return details;
}

// Tooltips: elements say theirs in data-tip, and keep it for screen readers in their label.
const tip = $("tip");
function showTip(text, x, y) {
  tip.textContent = text;
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(x + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${y + 18 + height > innerHeight ? Math.max(8, y - height - 12) : y + 18}px`;
}
const hideTip = () => { tip.hidden = true; };
document.addEventListener("pointermove", (event) => {
  const target = event.target instanceof Element && event.target.closest("[data-tip]");
  if (target) showTip(target.dataset.tip, event.clientX, event.clientY);
  else if (!(event.target instanceof Element && event.target.closest("[data-near]"))) hideTip();
});
document.addEventListener("focusin", (event) => {
  const target = event.target.closest("[data-tip]");
  if (!target) return hideTip();
  const box = target.getBoundingClientRect();
  return showTip(target.dataset.tip, box.left + box.width / 2, box.bottom - 12);
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
document.addEventListener("scroll", hideTip, { passive: true });

// Colours of times, from fast to slow, and of outcomes; read from the style sheet, which has them for light and dark.
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ramp = [];
function readColours() {
  ramp = style("--ramp").split(/\s+/).map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
}
function colourAt(share) {
  const place = Math.max(0, Math.min(1, share)) * (ramp.length - 1), at = Math.min(ramp.length - 2, Math.floor(place));
  return ramp[at].map((part, i) => Math.round(part + (ramp[at + 1][i] - part) * (place - at)));
}
const rgb = (colour) => `rgb(${colour.join(",")})`;
function inkOn(colour) {
  const [r, g, b] = colour.map((part) => ((part / 255) <= 0.04 ? part / 3294.6 : ((part / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}
function shade(node, colour) {
  node.style.backgroundColor = rgb(colour);
  node.style.color = inkOn(colour);
}
const LETTERS = { ok: "✓", slow: "S", pruned: "P", error: "E", wrong: "W", timeout: "T", crashed: "C", oom: "M",
  device_oom: "D", lost: "L", not_run: "N" };
