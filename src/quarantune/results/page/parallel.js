// Parallel coordinates: lines on a canvas, axes and brushes above it.
const MOST_LABELS = 14;
let geometry = null;

function setUpParallel() {
  $("parallel").hidden = !problem.varied.length || problem.isFew;
  drawParallel();
}

function drawParallel() {
  const p = problem, host = clear($("parallel-chart"));
  if ($("parallel").hidden) { geometry = null; return; }
  const list = [...p.varied], room = roomIn(host), gap = Math.max(92, (room - 190) / Math.max(1, list.length));
  const width = Math.max(room, 70 + gap * list.length + 100), height = 340, top = 44, bottom = 288;
  const y = scale(p.low * 0.97, p.high * 1.03, top, bottom, { log: true, count: 6 });
  const at = (tunable, v) => { const n = p.tunables[tunable].values.length; return bottom - ((v + 0.5) / n) * (bottom - top); };
  geometry = { p, list, x: (rank) => 70 + gap * rank, timeX: 70 + gap * list.length, y, at, width, height, top, bottom };
  const ratio = Math.min(2, devicePixelRatio || 1);
  const canvas = el("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio), "aria-hidden": "true" });
  canvas.style.width = `${width}px`; canvas.style.height = `${height}px`;
  geometry.context = canvas.getContext("2d");
  geometry.context.scale(ratio, ratio);
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "group", "aria-label": "Values of the tunables; choose some to keep the configs that have them" });
  list.forEach((tunable, rank) => svg.append(axisOf(tunable, rank)));
  svg.append(timeAxis());
  host.append(el("div", { class: "stage" }, canvas, svg));
  geometry.svg = svg;
  drawLines();
}

function axisOf(tunable, rank) {
  const { p, x, at, top, bottom } = geometry, { name, values } = p.tunables[tunable], px = x(rank);
  const group = draw("g", { class: "pc-axis", "data-tunable": tunable },
    draw("text", { x: px, y: top - 22, "text-anchor": "middle", class: "strong", text: fitted(name, 96, "600 13px system-ui") }),
    draw("line", { x1: px, x2: px, y1: top - 6, y2: bottom + 6, class: "pc-line" }));
  const brush = draw("rect", { x: px - 16, width: 32, y: top - 8, height: bottom - top + 16, class: "pc-grab" });
  group.append(brush);
  dragging(brush, (from, to) => {
    const chosen = new Set(range(values.length).filter((v) => at(tunable, v) >= from && at(tunable, v) <= to));
    choose(tunable, chosen);
  });
  const every = Math.ceil(values.length / MOST_LABELS);
  values.forEach((text, v) => {
    if (v % every) return;
    const label = draw("g", { role: "checkbox", tabindex: "0", class: "pc-value", "aria-label": `${name} ${text}`, "data-value": v },
      draw("text", { x: px + 9, y: at(tunable, v) + 4, text: fitted(text, 74) }),
      draw("circle", { cx: px, cy: at(tunable, v), r: 3.5 }));
    const toggle = () => {
      const chosen = new Set(selection.values.get(tunable) || []);
      for (let near = v; near < Math.min(values.length, v + every); near += 1) if (!chosen.delete(near)) chosen.add(near);
      choose(tunable, chosen);
    };
    label.addEventListener("click", toggle);
    label.addEventListener("keydown", (event) => {
      if (event.key === " " || event.key === "Enter") { event.preventDefault(); toggle(); }
    });
    group.append(label);
  });
  return group;
}

function timeAxis() {
  const { p, timeX, y, top, bottom, height } = geometry;
  const group = draw("g", { class: "pc-axis" },
    draw("text", { x: timeX, y: top - 22, "text-anchor": "middle", class: "strong", text: `time (${p.unit[1]})` }),
    draw("line", { x1: timeX, x2: timeX, y1: top - 6, y2: bottom + 6, class: "pc-line" }));
  for (const tick of p.timed.length ? y.ticks : []) group.append(draw("text", { x: timeX + 8, y: y(tick) + 4, class: "tick halo", text: p.tick(tick) }),
    draw("line", { x1: timeX - 3, x2: timeX + 3, y1: y(tick), y2: y(tick), class: "mark" }));
  if (p.trials.some((trial) => !trial.timed)) group.append(draw("text", { x: timeX + 8, y: height - 22, class: "tick halo", text: "no time" }), draw("circle", { cx: timeX, cy: height - 26, r: 3.5, class: "pc-none" }));
  const brush = draw("rect", { x: timeX - 16, width: 32, y: top - 8, height: bottom - top + 16, class: "pc-grab" });
  dragging(brush, (from, to) => { selection.time = to - from < 3 ? null : [y.invert(from), y.invert(to)]; changed(); });
  group.append(draw("rect", { id: "time-brush", x: timeX - 9, width: 18, y: 0, height: 0, class: "pc-brush" }), brush);
  return group;
}

// Calls back with the span of pixels that was dragged over.
function dragging(target, done) {
  const place = (event) => event.clientY - geometry.svg.getBoundingClientRect().top;
  target.addEventListener("pointerdown", (event) => {
    event.preventDefault();
    const start = place(event), mark = draw("rect", { x: Number(target.getAttribute("x")) + 7, width: 18, y: start, height: 0, class: "pc-brush" });
    target.before(mark);
    target.setPointerCapture(event.pointerId);
    const move = (moved) => {
      const now = place(moved);
      mark.setAttribute("y", Math.min(start, now));
      mark.setAttribute("height", Math.abs(now - start));
    };
    target.addEventListener("pointermove", move);
    target.addEventListener("lostpointercapture", (ended) => {
      target.removeEventListener("pointermove", move);
      const y = Number(mark.getAttribute("y")), tall = Number(mark.getAttribute("height"));
      mark.remove();
      done(y, y + tall, ended);
    }, { once: true });
  });
}

function drawLines() {
  const { p, list, x, timeX, y, at, context, width, height } = geometry;
  context.clearRect(0, 0, width, height);
  const selected = [], others = [];
  for (const trial of p.trials) if (trial.outcome.name !== "pruned") (matching.has(trial) ? selected : others).push(trial);
  const line = (trial) => {
    context.beginPath();
    list.forEach((tunable, rank) => {
      // Lines of one value fan out a little, so that they can be told apart.
      const n = p.tunables[tunable].values.length, fan = (((trial.i * 0.618) % 1) - 0.5) * Math.min(14, 150 / n);
      context[rank ? "lineTo" : "moveTo"](x(rank), at(tunable, trial.values[tunable]) + fan);
    });
    context.lineTo(timeX, trial.timed ? y(trial.ms) : height - 26);
    context.stroke();
  };
  context.lineWidth = 1;
  context.setLineDash([]);
  context.strokeStyle = style("--faint");
  context.globalAlpha = Math.max(0.05, Math.min(0.5, 60 / Math.max(1, others.length)));
  others.forEach(line);
  context.globalAlpha = Math.max(0.08, Math.min(0.9, 120 / Math.max(1, selected.length)));
  context.lineWidth = selected.length > 300 ? 1 : 1.5;
  const failures = new Map(OUTCOMES.map((outcome) => [outcome, style(`--o-${outcome.name}`)]));
  context.setLineDash([4, 4]);
  for (const trial of selected) if (!trial.timed) { context.strokeStyle = failures.get(trial.outcome); line(trial); }
  context.setLineDash([]);
  const timed = selected.filter((trial) => trial.timed).sort((a, b) => b.ms - a.ms);
  for (const trial of timed) { context.strokeStyle = rgb(colourAt(p.share(trial.ms))); line(trial); }
  if (p.best && matching.has(p.best)) {
    context.globalAlpha = 1; context.lineWidth = 3; context.strokeStyle = style("--accent");
    line(p.best);
  }
  context.globalAlpha = 1;
  for (const label of geometry.svg.querySelectorAll(".pc-value")) {
    const tunable = Number(label.parentNode.dataset.tunable), chosen = selection.values.get(tunable);
    label.setAttribute("aria-checked", chosen ? String(chosen.has(Number(label.dataset.value))) : "false");
    label.parentNode.classList.toggle("brushed", Boolean(chosen));
  }
  const span = geometry.svg.querySelector("#time-brush");
  const [from, to] = selection.time ? selection.time.map((ms) => Math.max(geometry.top, Math.min(geometry.bottom, y(ms)))) : [0, 0];
  span.setAttribute("y", from); span.setAttribute("height", Math.max(0, to - from));
  const left = p.trials.length - others.length - p.trials.filter((t) => t.outcome.name === "pruned").length;
  $("parallel-count").textContent = `${left.toLocaleString("en")} of ${plural(selected.length + others.length, "config")} selected`;
}

$("fastest").addEventListener("input", (event) => {
  const share = Number(event.target.value), sorted = problem.timed.map((t) => t.ms).sort((a, b) => a - b);
  const last = sorted[Math.max(0, Math.ceil((share / 100) * sorted.length) - 1)];
  selection.time = share >= 100 || !sorted.length ? null : [0, last];
  changed();
});
$("clear-brushes").addEventListener("click", () => { clearBrushes(); changed(); });
