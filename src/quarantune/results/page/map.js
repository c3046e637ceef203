// The outcome map: a table of two tunables, coloured by the best time or by the failure of each cell.
const MOST_CELLS = 40;
const axes = { x: null, y: null };

// The values of a tunable in at most MOST_CELLS groups of neighbours.
function groups(p, at) {
  const { values } = p.tunables[at], size = Math.ceil(values.length / MOST_CELLS);
  return range(Math.ceil(values.length / size)).map((g) => {
    const members = range(values.length).slice(g * size, (g + 1) * size);
    const first = values[members[0]], last = values[members[members.length - 1]];
    return { members: new Set(members), size, label: members.length > 1 ? `${first} … ${last}` : first };
  });
}

function setUpMap() {
  const p = problem, [first, second] = ranked(p);
  $("map").hidden = first === undefined || p.isFew;
  if ($("map").hidden) return;
  axes.x = first; axes.y = second ?? null;
  if (second !== undefined && p.tunables[second].values.length > p.tunables[first].values.length) [axes.x, axes.y] = [second, first];
  for (const side of ["x", "y"]) {
    const options = p.varied.map((at) => el("option", { value: at, text: p.tunables[at].name }));
    if (side === "y") options.unshift(el("option", { value: "", text: "(none)" }));
    clear($(`map-${side}`)).append(...options);
    $(`map-${side}`).value = axes[side] ?? "";
  }
  drawMap();
}

function mapCells(p, xs, ys) {
  const place = (at, list) => { const where = []; list.forEach((group, g) => group.members.forEach((v) => { where[v] = g; })); return (trial) => (at === null ? 0 : where[trial.values[at]]); };
  const column = place(axes.x, xs), row = place(axes.y, ys);
  const cells = ys.map(() => xs.map(() => ({ timed: [], ends: new Map(), n: 0 })));
  for (const trial of p.trials) {
    const cell = cells[row(trial)][column(trial)];
    cell.n += 1;
    cell.ends.set(trial.outcome, (cell.ends.get(trial.outcome) || 0) + 1);
    if (trial.timed) cell.timed.push(trial);
    if (trial === p.best) cell.won = true;
    if (trial === p.default) cell.was = true;
  }
  for (const cell of cells.flat()) cell.best = leastOf(cell.timed);
  return cells;
}

const commonEnd = (cell) => [...cell.ends].sort((a, b) => b[1] - a[1])[0][0];
function mapCell(p, cell, where, go) {
  if (!cell.n) return el("td", { class: "none" }, el("span", { class: "visually-hidden", text: "no config" }));
  const failures = [...cell.ends].filter(([outcome]) => outcome.failed).reduce((sum, [, n]) => sum + n, 0);
  const worst = commonEnd(cell);
  const counts = [...cell.ends].map(([outcome, n]) => `${n} ${outcome.label}`).join(", ");
  const text = cell.best ? rangeText(p, cell.best) : worst.letter;
  const tipText = `${where}\n${cell.best ? `best ${text} ${p.unit[1]}: ${shortText(p, cell.best.first)}\n` : ""}${counts}${cell.won ? "\nthe winner is here" : ""}${cell.was ? "\nthe defaults are here" : ""}`;
  const button = el("button", { type: "button", class: `cell${cell.best ? "" : ` fill ${worst.name}`}${cell.best && failures ? " some" : ""}${cell.won ? " won" : ""}${cell.was ? " was" : ""}`,
    tabindex: "-1", "data-tip": tipText, "aria-label": `${text}; ${tipText.replaceAll("\n", "; ")}`, onclick: go }, cell.best ? text : el("span", { class: "letter", text }));
  if (cell.best) shade(button, colourAt(p.share(cell.best.first.ms)));
  return el("td", {}, button);
}

function drawMap() {
  const p = problem;
  if ($("map").hidden) return;
  const one = [{ members: new Set(), label: "" }];
  const xs = groups(p, axes.x), ys = axes.y === null ? one : groups(p, axes.y), cells = mapCells(p, xs, ys);
  const nameX = p.tunables[axes.x].name, nameY = axes.y === null ? "" : p.tunables[axes.y].name;
  const go = (gx, gy) => () => {
    clearBrushes();
    selection.values.set(axes.x, gx.members);
    if (axes.y !== null) selection.values.set(axes.y, gy.members);
    changed();
    $("trials").scrollIntoView({ block: "start" });
    $("trials").focus({ preventScroll: true });
  };
  const table = el("table", { class: "map" },
    el("caption", {}, el("span", { text: `${nameX} across${nameY ? `, ${nameY} down` : ""}: the best time in each cell (${p.unit[1]}); choose a cell to see its configs` })),
    el("thead", {}, el("tr", {}, el("td", { class: "corner", text: nameY ? `${nameY} ↓  ${nameX} →` : `${nameX} →` }), xs.map((g) => el("th", { scope: "col", text: g.label })))),
    el("tbody", {}, ys.map((gy, y) => el("tr", {}, gy.label ? el("th", { scope: "row", text: gy.label }) : el("td", { class: "corner" }),
      xs.map((gx, x) => mapCell(p, cells[y][x], `${nameX}=${gx.label}${nameY ? ` ${nameY}=${gy.label}` : ""}`, go(gx, gy)))))));
  if (xs.length > 16) table.classList.add("dense");
  else table.style.setProperty("--cell", `${Math.max(46, Math.min(132, ($("map-chart").clientWidth - 150) / xs.length - 3))}px`);
  clear($("map-chart")).append(table);
  roving(table);
  const flat = cells.flat().filter((cell) => cell.n), dead = flat.filter((cell) => !cell.best).length;
  $("map-finding").textContent = dead === flat.length ? "No config has a time in any cell." : dead ? `In ${dead} of ${plural(flat.length, "cell")} no config has a time; elsewhere the best one counts, whatever the other tunables.`
    : `Some config has a time in every cell; the best one counts, whatever the other tunables.`;
  mapLegend(p, flat);
}

function mapLegend(p, cells) {
  const seen = new Set(cells.filter((cell) => !cell.best).map(commonEnd));
  const gradient = el("span", { class: "gradient" });
  gradient.style.background = `linear-gradient(90deg, ${range(9).map((i) => rgb(colourAt(i / 8))).join(",")})`;
  clear($("map-legend")).append(
    p.timed.length ? el("span", { class: "item" }, `${p.ms(p.least)}, the fastest`, gradient, `${atLeast(p, p.rampEnd)} ${p.unit[1]}`) : "",
    ...OUTCOMES.filter((outcome) => seen.has(outcome)).map((outcome) => el("span", { class: "item" }, el("span", { class: `key fill ${outcome.name}`, "aria-hidden": "true" }, el("span", { class: "letter", text: outcome.letter })), `all ${outcome.label}`)),
    cells.some((cell) => cell.best && [...cell.ends.keys()].some((o) => o.failed)) ? el("span", { class: "item" }, el("span", { class: "key some", "aria-hidden": "true" }), "some failed") : "",
    cells.some((cell) => cell.won) ? el("span", { class: "item" }, el("span", { class: "key won", "aria-hidden": "true" }), "winner") : "",
    cells.some((cell) => cell.was) ? el("span", { class: "item" }, el("span", { class: "key was", "aria-hidden": "true" }), "defaults") : "");
}

// One stop of the Tab key for all cells; the arrow keys move between them.
function roving(table) {
  const rows = [...table.tBodies[0].rows].map((row) => [...row.cells].slice(1).map((cell) => cell.querySelector("button")));
  const start = table.querySelector(".won") || table.querySelector("button");
  if (start) start.tabIndex = 0;
  table.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!move) return;
    let y = rows.findIndex((row) => row.includes(event.target)), x = y < 0 ? -1 : rows[y].indexOf(event.target);
    if (y < 0) return;
    event.preventDefault();
    do { y += move[0]; x += move[1]; } while (rows[y] && x >= 0 && x < rows[y].length && !rows[y][x]);
    const next = rows[y] && rows[y][x];
    if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
  });
}
for (const side of ["x", "y"]) $(`map-${side}`).addEventListener("change", (event) => {
  const chosen = event.target.value === "" ? null : Number(event.target.value), other = side === "x" ? "y" : "x";
  if (chosen !== null && axes[other] === chosen) { axes[other] = axes[side]; $(`map-${other}`).value = axes[side] ?? ""; }
  axes[side] = chosen;
  drawMap();
});
