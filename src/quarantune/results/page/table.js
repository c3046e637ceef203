// The table of trials: filtered, sorted, a page at a time.
const PAGE_ROWS = 50;
let pageRows = PAGE_ROWS;
const view = { key: null, descending: false, page: 0, open: new Set(), rows: [] };
let matching = new Set();

// A filter is words that must all be there, and terms such as BM=128, time<20us or compile>2. Times without a unit are in
// that of the page. What is not understood is told, and selects nothing.
const FIELDS = "time, compile, memory, device_memory, outcome, phase, device";
const IN_MS = { ns: 1e-6, us: 1e-3, "µs": 1e-3, "μs": 1e-3, ms: 1, s: 1e3 };
const IN_BYTES = { "": 1, b: 1, kb: 1e3, mb: 1e6, gb: 1e9, kib: 2 ** 10, mib: 2 ** 20, gib: 2 ** 30 };
let complaint = "";
function termsOf(words) {
  complaint = "";
  return words.trim().toLowerCase().split(/\s+/).filter(Boolean).map((word) => {
    const refuse = (why) => { complaint ||= why; return () => false; };
    const [, name, sign, text] = /^([^<>=]*)(<=|>=|=|<|>)(.*)$/.exec(word) || [];
    if (!sign) return (trial) => trial.search().includes(word);
    const get = fieldNamed(name);
    if (!get) return refuse(`There is no “${name}” to compare: use ${[...problem.tunables.map((tunable) => tunable.name), FIELDS].join(", ")}.`);
    const [, amount, unit] = /^([-+.\de]*\d\.?)([a-zµμ]*)$/.exec(text) || [];
    const factors = { time: IN_MS, memory: IN_BYTES, device_memory: IN_BYTES, compile: { "": 1, s: 1, ms: 1e-3 } }[IN_MS[name] ? "time" : name] || { "": 1 };
    const factor = IN_MS[name] && unit === "" ? IN_MS[name] : unit === "" && name === "time" ? 1 / problem.unit[0] : factors[unit];
    const number = amount === undefined || factor === undefined ? NaN : Number(amount) * factor;
    if (sign !== "=" && Number.isNaN(number)) return refuse(`“${word}” needs a number after ${sign}, as in ${name || "time"}${sign}20.`);
    if (text === "") return refuse(`“${word}” needs a value after ${sign}.`);
    if (sign === "=") return (trial) => String(get(trial) ?? "").toLowerCase() === text || (!Number.isNaN(number) && get(trial) !== null && get(trial) !== "" && Number(get(trial)) === number);
    const is = { "<": (a) => a < number, ">": (a) => a > number, "<=": (a) => a <= number, ">=": (a) => a >= number }[sign];
    return (trial) => { const found = get(trial); return found !== null && found !== "" && is(Number(found)); };
  });
}
function fieldNamed(name) {
  const at = problem.tunables.findIndex((tunable) => tunable.name.toLowerCase() === name);
  if (at >= 0) return (trial) => value(problem, trial, at);
  if (IN_MS[name]) return (t) => t.ms;
  return { time: (t) => t.ms, compile: (t) => t.compile, memory: (t) => t.memory, device_memory: (t) => t.deviceMemory, outcome: (t) => t.outcome.name, phase: (t) => t.phase, device: (t) => t.device }[name] || null;
}

// A column of numbers, of which those that are not known come last.
const numbers = (key, name, of, show, title) => ({ key, name, number: true, get: (t) => (of(t) === null ? "" : show(of(t))), by: (t) => of(t) ?? Infinity, title });
function columnsOf(p) {
  const places = (trial) => (trial.timed ? (trial.final ? 0 : 1e9) + trial.ms : Infinity);  // finalists come first
  const reference = p.defaultMs;
  return [
    ...p.tunables.map((tunable, at) => ({ key: `t${at}`, name: tunable.name, number: tunable.numeric, get: (t) => value(p, t, at), by: (t) => t.values[at] })),
    { key: "outcome", name: "outcome", get: null, by: (t) => OUTCOMES.indexOf(t.outcome) },
    { key: "ms", name: p.unit[1], number: true, get: (t) => (t.ms === null ? "" : t.kind === "at least" ? atLeast(p, t.ms) : digits(t.ms * p.unit[0])), by: places, title: "time of one call: the median of the final, else of the config's own samples; after > a bound" },
    ...(reference === null ? [] : [{ key: "gain", name: "vs defaults", number: true, get: (t) => ((p.finals.length ? t.final : t.timed && t.kind !== "at least") ? times(reference / t.ms) : ""), by: places, title: "time of the defaults divided by this time, where they were timed in turn" }]),
    ...p.figures.map(([name, heading, title], at) => numbers(name, heading, (t) => t.figures[at], digits, title)),
    ...["bits", "batch"].filter((name) => new Set(p.trials.map((t) => t[name])).size > 1).map((name) => ({ key: name, name, get: (t) => t[name], by: (t) => t[name] })),
    numbers("compile", "compile s", (t) => t.compile, digits),
    numbers("memory", "memory", (t) => t.memory, bytes, "most host memory that the worker held"),
    numbers("device", "on device", (t) => t.deviceMemory, bytes, "device memory of its program: arguments, output and intermediate arrays"),
    // That of a config that was stopped early says no more than its bound.
    { key: "message", name: "message", get: (t) => t.kind === "at least" ? "" : short(t.message.replace(/\s+/g, " "), 240), by: (t) => t.message },
  ];
}
// A column with one text in all rows is told once, above the table; one without any is left out.
function told(columns, p) {
  const same = [], kept = [];
  for (const column of columns) {
    const texts = new Set(column.get ? p.trials.map(column.get) : [1, 2]);
    if (texts.size > 1 || (p.trials.length < 2 && !texts.has(""))) kept.push(column);
    else if (!texts.has("") && !texts.has("0")) same.push(`${column.name}${column.key[0] === "t" ? "=" : " "}${[...texts][0]}`);
  }
  return [kept, same];
}

function setUpTable() {
  const p = problem;
  for (const trial of p.trials) {
    let text = null;
    trial.search = () => (text ??= `${configText(p, trial)} ${trial.outcome.name} ${trial.outcome.label} ${trial.phase} ${trial.message} ${trial.log}`.toLowerCase());
  }
  const [columns, same] = told(columnsOf(p), p);
  Object.assign(view, { key: columns.some(({ key }) => key === "ms") ? "ms" : "outcome", descending: false, page: 0, open: new Set(), columns });
  $("trials").classList.toggle("wide", columns.length > 10);
  $("same").textContent = same.length ? `All: ${same.join(", ")}` : "";
  clear($("outcomes")).append(...endsOf(p.trials).map(([outcome, n]) => el("button", { type: "button", class: "chip", "aria-pressed": "true", "data-outcome": outcome.name, onclick: () => {
    if (!selection.hidden.delete(outcome.name)) selection.hidden.add(outcome.name);
    changed();
  } }, el("span", { class: `key ${outcome.name}`, "aria-hidden": "true", text: outcome.letter }), `${outcome.label} ${n.toLocaleString("en")}`)));
  $("trials").hidden = !p.trials.length;
  drawHead();
}

function drawHead() {
  clear($("table")).append(
    el("caption", { class: "visually-hidden", text: "Trials; the buttons in the heading sort" }),
    el("thead", {}, el("tr", {}, el("th", { scope: "col" }, el("span", { class: "visually-hidden", text: "details" })),
      view.columns.map((column) => el("th", { scope: "col", class: column.number ? "number" : null, "data-key": column.key, title: column.title },
        el("button", { type: "button", class: "sort", onclick: () => sortBy(column.key) }, column.name, el("span", { class: "arrow", "aria-hidden": "true" })))))),
    el("tbody", {}));
}

function sortBy(key) {
  view.descending = view.key === key && !view.descending;
  view.key = key;
  view.page = 0;
  sortRows();
  drawRows();
}

function filterRows() {
  const terms = termsOf(selection.words);
  view.rows = problem.trials.filter((trial) => !selection.hidden.has(trial.outcome.name) && brushed(trial) && terms.every((is) => is(trial)));
  matching = new Set(view.rows);
  sortRows();
}

function sortRows() {
  const { by } = view.columns.find((column) => column.key === view.key), sign = view.descending ? -1 : 1;
  const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b) : a < b ? -1 : a > b ? 1 : 0);
  // Configs without a time come last in both directions.
  const none = (x) => x === Infinity;
  view.rows.sort((a, b) => { const x = by(a), y = by(b); return none(x) || none(y) ? none(x) - none(y) || a.i - b.i : sign * compare(x, y) || a.i - b.i; });
}

function drawRows() {
  const p = problem, pages = Math.max(1, Math.ceil(view.rows.length / pageRows));
  view.page = Math.max(0, Math.min(view.page, pages - 1));
  for (const th of $("table").querySelectorAll("th[data-key]")) {
    if (th.dataset.key === view.key) th.setAttribute("aria-sort", view.descending ? "descending" : "ascending");
    else th.removeAttribute("aria-sort");
  }
  const body = el("tbody", {});
  for (const trial of view.rows.slice(view.page * PAGE_ROWS, view.page * PAGE_ROWS + pageRows)) addRow(body, p, trial);
  if (!view.rows.length) body.append(el("tr", {}, el("td", { colspan: view.columns.length + 1, class: "muted empty", text: complaint ? "The filter is not understood." : "No trial matches." })));
  $("table").tBodies[0].replaceWith(body);
  const first = view.rows.length ? view.page * PAGE_ROWS + 1 : 0, last = Math.min(view.rows.length, view.page * PAGE_ROWS + pageRows);
  const brushes = [...selection.values].map(([at, chosen]) => `${p.tunables[at].name} ${chosen.size > 4 ? `${chosen.size} values` : [...chosen].map((v) => p.tunables[at].values[v]).join(" or ")}`);
  if (selection.time) brushes.push(`time ${selection.time[0] ? `from ${p.ms(selection.time[0])} ` : ""}to ${p.ms(selection.time[1])}`);
  $("filter").setAttribute("aria-invalid", String(Boolean(complaint)));
  $("count").textContent = complaint || `${view.rows.length.toLocaleString("en")} of ${plural(p.trials.length, "trial")}${brushes.length ? ` with ${brushes.join(", ")}` : ""}`;
  $("page").textContent = pages > 1 ? `${first.toLocaleString("en")} to ${last.toLocaleString("en")} of ${view.rows.length.toLocaleString("en")}` : "";
  document.querySelector(".pager").hidden = pages < 2;
  $("previous").disabled = view.page === 0;
  $("next").disabled = view.page >= pages - 1;
  for (const chip of $("outcomes").children) chip.setAttribute("aria-pressed", String(!selection.hidden.has(chip.dataset.outcome)));
}

function addRow(body, p, trial) {
  const mark = trial === p.best ? "★" : p.tie.includes(trial) ? "=" : trial === p.default ? "◆" : "";
  const what = { "★": "winner", "=": "tied with the winner", "◆": "the defaults" }[mark] || "";
  const open = view.open.has(trial);
  const toggle = () => {
    if (!view.open.delete(trial)) view.open.add(trial);
    const at = [...body.querySelectorAll("button.open")].indexOf(button);
    drawRows();
    $("table").tBodies[0].querySelectorAll("button.open")[at]?.focus({ preventScroll: true });
  };
  const button = el("button", { type: "button", class: "open", "aria-expanded": String(open), "aria-label": `Details of ${configText(p, trial)}${what ? `, ${what}` : ""}` }, el("span", { class: "caret", "aria-hidden": "true", text: open ? "▾" : "▸" }), el("span", { class: "flag", title: what || null, "aria-hidden": "true", text: mark }));
  // A click anywhere opens the row, but one that ends the selection of a text does not.
  const onclick = () => { if (getSelection().isCollapsed) toggle(); };
  body.append(el("tr", { class: trial === p.best ? "won" : trial === p.default ? "was" : null, onclick }, el("td", {}, button),
    view.columns.map((column) => column.key === "outcome"
      ? el("td", { class: "outcome", "data-name": "outcome" }, el("span", { class: `key ${trial.outcome.name}`, "aria-hidden": "true", text: trial.outcome.letter }), trial.outcome.label + (trial.outcome.failed && trial.phase ? `, ${trial.phase}` : ""))
      : el("td", { "data-name": column.get(trial) === "" ? null : column.name, class: column.number ? "number" : column.key === "message" ? "message" : "value-cell", title: /^t\d/.test(column.key) && column.get(trial).length > 24 ? column.get(trial) : null, text: column.get(trial) }))));
  if (open) body.append(el("tr", { class: "more" }, el("td", { colspan: view.columns.length + 1 }, detailsOf(p, trial))));
}

const KINDS = { final: "the median of the final", median: "the median of its samples, before the final", mean: "the mean over the calls", "at least": "a bound: it was stopped early, and no sample was shorter" };
function detailsOf(p, trial) {
  const facts = [["config", configText(p, trial)], ["time", trial.timed ? `${timeText(p, trial)}, ${KINDS[trial.kind]}` : ""], ["device", trial.device], ["figures", figuresText(p, trial).trim().replaceAll("\n", "; ")], ["clock", { device: "the device's own", queued: "queued runs", wall: "wall time" }[trial.clock]], ["samples", trial.samples.length ? `${trial.samples.length}: ${trial.samples.slice(0, 40).map((ms) => digits(ms * p.unit[0])).join(", ")}${trial.samples.length > 40 ? " …" : ""} ${p.unit[1]}` : ""]];
  return el("div", { class: "detail" },
    el("dl", {}, facts.filter(([, text]) => text).map(([name, text]) => el("div", {}, el("dt", { text: name }), el("dd", { text })))),
    trial.message ? el("div", {}, el("h3", { text: "Message" }), el("pre", { text: trial.message })) : null,
    trial.log ? el("div", {}, el("h3", { text: "Last lines of its log" }), el("pre", { text: trial.log })) : null,
    el("div", { class: "row tools" }, copyButton("Copy config as Python", () => asPython(p, trial)), repeatText(p, trial) ? copyButton("Copy the command that repeats it alone", () => repeatText(p, trial)) : null),
    repeatText(p, trial) ? el("pre", { class: "repeat", text: repeatText(p, trial) }) : null,
    trial.message || trial.log ? null : el("p", { class: "muted", text: "It left neither a message nor a log." }));
}

// What can be taken along: a config as Python, the command that repeats one config alone, all trials as CSV or JSON.
const jsonOf = (p, trial) => `{${p.tunables.map((tunable, at) => [tunable, tunable.json[trial.values[at]]]).filter(([, json]) => json !== '{"$unset":null}').map(([tunable, json]) => `${JSON.stringify(tunable.name)}: ${json}`).join(", ")}}`;
const asPython = (p, trial) => jsonOf(p, trial).replace(/"(?:[^"\\]|\\.)*"|\b(?:true|false|null)\b/g, (word) => ({ true: "True", false: "False", null: "None" }[word] || word));
function repeatText(p, trial) {
  const shapes = p.label.split(", ").length && [...p.label.matchAll(/(?:^|, )(?:\w+ )?(\w+\[[\d,]*\])/g)].map((found) => found[1]);
  const known = p.tunables.every((tunable, at) => /^[^.$]+$/.test(tunable.name) && !/\$(?!unset)/.test(tunable.json[trial.values[at]]));
  const [, module, name] = /^(.+)\.([^.]+)$/.exec(data.title) || [null, "MODULE", data.title];
  if (!known || !/^[\w.]+$/.test(data.title) || !shapes.length) return "";
  return `quarantune run ${module}:${name} --config '${jsonOf(p, trial).replaceAll("'", "'\\''")}' --args '${shapes.join(" ")}'`;
}
function copyButton(text, get) {
  const button = el("button", { type: "button", class: "plain", text, onclick: async () => {
    let done = "Copied";
    try { await navigator.clipboard.writeText(get()); } catch { done = "Not allowed here: select the text below"; button.after(el("pre", { class: "repeat", text: get() })); }
    button.textContent = done;
    setTimeout(() => { button.textContent = text; }, 2000);
  } });
  return button;
}
function exported(kind) {
  const p = problem, rows = view.rows.map((trial) => ({ ...JSON.parse(jsonOf(p, trial)), outcome: trial.outcome.name, phase: trial.phase, time_ms: trial.ms, time_kind: trial.kind, compile_s: trial.compile, peak_memory_bytes: trial.memory, device_memory_bytes: trial.deviceMemory, flops: trial.flops, moved_bytes: trial.moved, ...Object.fromEntries(p.figures.map(([name], at) => [name, trial.figures[at]])), message: trial.message }));
  if (kind === "json") return JSON.stringify(rows, null, 1);
  const names = [...new Set(rows.flatMap((row) => Object.keys(row)))];
  const cell = (v) => { const text = v === null || v === undefined ? "" : typeof v === "object" ? JSON.stringify(v) : String(v); return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text; };
  return [names, ...rows.map((row) => names.map((name) => row[name]))].map((row) => row.map(cell).join(",")).join("\r\n");
}
for (const kind of ["csv", "json"]) $(`save-${kind}`).addEventListener("click", () => {
  const link = el("a", { href: URL.createObjectURL(new Blob([exported(kind)])), download: `${data.title.replace(/[^\w.-]+/g, "_").slice(0, 60)}.${kind}` });
  link.click();
  URL.revokeObjectURL(link.href);
});

// On paper there is nothing to scroll or to turn over.
addEventListener("beforeprint", () => { pageRows = Infinity; view.page = 0; drawRows(); });
addEventListener("afterprint", () => { pageRows = PAGE_ROWS; drawRows(); });

$("filter").addEventListener("input", (event) => { selection.words = event.target.value; changed(); });
$("clear-all").addEventListener("click", () => { clearBrushes(); selection.hidden.clear(); selection.words = ""; $("filter").value = ""; changed(); });
$("previous").addEventListener("click", () => { view.page -= 1; drawRows(); });
$("next").addEventListener("click", () => { view.page += 1; drawRows(); });
