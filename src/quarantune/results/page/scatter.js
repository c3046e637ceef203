// Two figures of every config against each other, which the reader chooses. Time against device memory has the line of
// the configs that no other is known to beat in both.
const plane = { x: null, y: null };

// What an axis can show: for each trial a number, or the place of a value that is no number.
function fieldsOf(p) {
  const mib = (n) => (n === null ? null : n / 2 ** 20);
  const fields = [
    { key: "ms", name: `time of one call (${p.unit[1]})`, of: (t) => (t.timed ? t.ms * p.unit[0] : null) },
    { key: "compile", name: "compile time (s)", of: (t) => t.compile },
    { key: "device", name: "device memory (MiB)", of: (t) => mib(t.deviceMemory) },
    { key: "memory", name: "host memory (MiB)", of: (t) => mib(t.memory) },
    ...p.figures.map(([name, heading], at) => ({ key: `f${name}`, name: heading, of: (t) => t.figures[at] })),
    ...p.varied.map((at) => {
      const { name, values, numeric } = p.tunables[at];
      return { key: `t${at}`, name, names: numeric ? null : values, of: (t) => (numeric ? Number(values[t.values[at]]) : t.values[at]) };
    }),
  ];
  return fields.filter(({ of }) => new Set(p.trials.map(of).filter((value) => value !== null && Number.isFinite(value))).size > 1);
}

function setUpScatter() {
  const p = problem, fields = fieldsOf(p), has = (key) => fields.some((field) => field.key === key);
  $("scatter").hidden = p.isFew || fields.length < 2 || p.timed.length < 2;
  if ($("scatter").hidden) return;
  plane.y = has("ms") ? "ms" : fields[0].key;
  plane.x = ["device", ...ranked(p).map((at) => `t${at}`), "compile", ...fields.map(({ key }) => key)].find((key) => has(key) && key !== plane.y);
  for (const side of ["x", "y"]) {
    clear($(`scatter-${side}`)).append(...fields.map(({ key, name }) => el("option", { value: key, text: name })));
    $(`scatter-${side}`).value = plane[side];
  }
  drawScatter();
}

function drawScatter() {
  const p = problem, host = clear($("scatter-chart"));
  if ($("scatter").hidden) return;
  const fields = fieldsOf(p), [fx, fy] = ["x", "y"].map((side) => fields.find(({ key }) => key === plane[side]));
  const known = p.trials.filter((trial) => [fx, fy].every(({ of }) => of(trial) !== null && Number.isFinite(of(trial))));
  const isMemory = fx.key === "device" && fy.key === "ms" && p.pareto.length;
  const front = isMemory ? p.pareto.map((i) => p.trials[i]) : [];
  $("scatter-finding").textContent = (isMemory ? frontText(p, front) : `Each dot is one of ${plural(known.length, "config")}.`)
    + (known.some((trial) => trial.kind === "at least") && [fx.key, fy.key].includes("ms") ? " Pale dots were stopped early: they take at least that long." : "");
  const width = Math.max(280, roomIn(host)), left = 62, right = width - 24, top = 30, bottom = 300, height = bottom + 46;
  const x = planeScale(fx, known, left, right, width < 560 ? 3 : 8), y = planeScale(fy, known, bottom, top, 6);
  const svg = chart(width, height, `${fy.name} against ${fx.name} of ${plural(known.length, "config")}`);
  for (const [at, text] of y.marks) svg.append(draw("line", { x1: left, x2: right, y1: at, y2: at, class: "grid" }),
    draw("text", { x: left - 8, y: at + 4, "text-anchor": "end", class: "tick", text: fitted(text, left - 10) }));
  const room = (right - left) / Math.max(1, x.marks.length) - 6;
  for (const [at, text] of x.marks) svg.append(draw("line", { x1: at, x2: at, y1: bottom, y2: bottom + 5, class: "mark" }),
    draw("text", { x: at, y: bottom + 19, "text-anchor": "middle", class: "tick", text: fitted(text, Math.max(20, room)) }));
  svg.append(draw("text", { x: left - 54, y: 14, class: "axis", text: `${fy.name}${y.log ? ", logarithmic" : ""}` }),
    draw("text", { x: right, y: height - 7, "text-anchor": "end", class: "axis", text: `${fx.name}${x.log ? ", logarithmic" : ""}` }));
  const points = known.map((trial) => [x.at(fx.of(trial), trial), y.at(fy.of(trial), trial), trial]);
  timedDots(svg, points, known.length);
  if (front.length) {
    const line = points.filter(([, , trial]) => front.includes(trial)).sort((a, b) => b[0] - a[0]);
    svg.append(draw("path", { d: `M${right} ${line[0][1].toFixed(1)}${line.map(([px, py]) => `V${py.toFixed(1)}H${px.toFixed(1)}`).join("")}V${top}`, class: "best-line thin" }));
  }
  for (const [trial, kind, name] of [[p.default, "was", "defaults"], [p.best, "best", "winner"]]) {
    const place = points.find(([, , other]) => other === trial);
    if (!place || (kind === "was" && p.default === p.best)) continue;
    const isLeft = place[0] > right - 70;
    svg.append(draw("path", { d: dots([place]), class: `dots ${kind}` }), draw("text", { x: place[0] + (isLeft ? -9 : 9), y: place[1] - 7, "text-anchor": isLeft ? "end" : "start", class: `halo ${kind === "best" ? "strong small" : "tick"}`, text: name }));
  }
  nearest(svg, points, p);
  const rows = (front.length ? front : [...known].sort((a, b) => fy.of(a) - fy.of(b)));
  const cell = (field, trial) => (field.key === "ms" ? timeText(p, trial) : field.names ? field.names[field.of(trial)] : digits(field.of(trial)));
  host.append(svg, asTable(["config", fx.name, fy.name], rows.map((trial) => [shortText(p, trial), cell(fx, trial), cell(fy, trial)])));
}

function planeScale(field, trials, from, to, count) {
  const found = trials.map(field.of), low = Math.min(...found), high = Math.max(...found);
  const inset = Math.sign(to - from) * 14;
  const to_pixels = field.names ? scale(0, field.names.length - 1, from + inset, to - inset, { log: false }) : scale(low, high, from + inset, to - inset, { count, log: low > 0 && high > 3 * low });
  const every = field.names ? Math.ceil(field.names.length / (2 * count)) : 1;
  const marks = field.names ? field.names.map((text, v) => [to_pixels(v), text]).filter((_, v) => v % every === 0) : to_pixels.ticks.map((tick) => [to_pixels(tick), trimmed(tick)]);
  // Configs of one value fan out a little, so that they can be told apart.
  const fan = (trial) => (/^t\d/.test(field.key) ? (((trial.i * 0.618) % 1) - 0.5) * 10 : 0);
  return { log: to_pixels.log, marks, at: (value, trial) => to_pixels(value) + fan(trial) };
}

function frontText(p, front) {
  const [fast] = front, small = front[front.length - 1];
  if (front.length === 1) return `${shortText(p, fast)} takes the least time and the least device memory: ${timeText(p, fast)} and ${bytes(fast.deviceMemory)}.`;
  const ratio = small.ms / fast.ms, more = small.kind === "at least" ? `at least ${times(bound(ratio, 3))}` : times(ratio);
  return `${front.length} configs are worth a choice: no other is known to beat them in both. From ${bytes(fast.deviceMemory)} and ${timeText(p, fast)}, memory falls to ${bytes(small.deviceMemory)}, for ${more} the time.`;
}
for (const side of ["x", "y"]) $(`scatter-${side}`).addEventListener("change", (event) => { plane[side] = event.target.value; drawScatter(); });
