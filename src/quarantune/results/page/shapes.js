// Several problems of one function: the choice of each, and how each choice does on the others.
const MOST_ELSEWHERE = 24;

function drawShapes() {
  const all = problems();
  $("shapes").hidden = all.length < 2;
  if (all.length < 2) return;
  const names = [...new Set(all.flatMap((p) => p.choice.map(([name]) => name)))];
  const distinct = new Set(all.map((p) => p.bestText)).size;
  const moving = names.filter((name) => new Set(all.map((p) => choiceOf(p, name))).size > 1);
  const universal = oneForAll(all);
  const pairs = all.filter((p) => p.when === "before").map((p) => [p, all.find((q) => q.when === "after" && callOf(q) === callOf(p))]).filter(([, q]) => q);
  $("shapes-title").textContent = pairs.length ? "Before and after" : "How the choice changes with the problem";
  $("shapes-finding").textContent = pairs.length ? pairs.map(([p, q]) => `${callOf(p)}: ${gainText(p, q)}.`).join(" ") : (distinct === 1 ? `One config wins for all ${all.length} problems. `
    : `${distinct} different configs win for ${all.length} problems; ${moving.length ? `${moving.join(", ")} change${moving.length === 1 ? "s" : ""}` : "nothing changes"} with the problem. `)
    + (universal && distinct > 1 ? `With ${universal.text} for all, none would be more than ${percent(universal.regret - 1)} slower.` : "");
  const most = Math.max(...all.map((p) => (p.bestMs && p.defaultMs ? p.defaultMs / p.bestMs : 0)));
  const ranks = new Map(names.map((name) => [name, valuesIn(all, name)]));
  clear($("shapes-table")).append(el("table", { class: "shapes" },
    el("caption", { class: "visually-hidden", text: "The choice for each problem, by size" }),
    el("thead", {}, el("tr", {}, ["problem", ...names, "time", "vs defaults"].map((name, i) => el("th", { scope: "col", class: i > names.length ? "number" : null, text: name })))),
    el("tbody", {}, all.map((p, i) => el("tr", { class: p === problem ? "won" : null },
      el("th", { scope: "row" }, el("button", { type: "button", class: "link", "aria-current": p === problem ? "true" : null, text: p.label, onclick: () => show(i) })),
      names.map((name) => valueCell(choiceOf(p, name), ranks.get(name))),
      el("td", { class: "number", text: p.bestMs === null ? "–" : p.ms(p.bestMs) }),
      gainCell(p, most))))));
  drawElsewhere(all);
}
const callOf = (p) => p.label.replace(/, (before|after)$/, "");
function gainText(before, after) {
  if (!before.bestMs || !after.bestMs) return "the times are not known";
  const gain = before.bestMs / after.bestMs, choice = before.bestText === after.bestText ? `with ${after.bestText} as before` : `with ${after.bestText} in place of ${before.bestText}`;
  const compared = Math.abs(gain - 1) < 0.005 ? "as fast as before" : gain > 1 ? `${times2(gain)} faster than before` : `${times2(1 / gain)} slower than before`;
  return `${before.ms(before.bestMs)} before, ${after.ms(after.bestMs)} after, ${compared}, ${choice}`;
}
const choiceOf = (p, name) => (p.choice.find(([own]) => own === name) || [name, ""])[1];
function valuesIn(all, name) {
  const values = [...new Set(all.map((p) => choiceOf(p, name)))];
  return values.every((text) => text !== "" && !Number.isNaN(Number(text))) ? values.sort((a, b) => a - b) : values.sort();
}
function valueCell(text, ordered) {
  const cell = el("td", {}, el("span", { class: "value", text: text || "–" }));
  if (ordered.length > 1) shade(cell.firstChild, colourAt(0.85 - 0.75 * (ordered.indexOf(text) / (ordered.length - 1))));
  return cell;
}
function gainCell(p, most) {
  if (!p.bestMs || !p.defaultMs) return el("td", { class: "number muted", text: "unknown" });
  const gain = p.defaultMs / p.bestMs, bar = el("span", { class: "gain-bar", "aria-hidden": "true" });
  bar.style.width = `${(100 * gain) / most}px`;
  return el("td", { class: "number gain-cell" }, bar, times2(gain));
}

// The times of configs that were measured, by their text.
function timesOf(p) {
  p.byText ??= new Map(p.timed.filter((t) => t.outcome.name === "ok").map((t) => [configText(p, t), t.ms]));
  return p.byText;
}
const bestTextOf = (p) => (p.best ? configText(p, p.best) : null);
function oneForAll(all) {
  if (all.some((p) => !p.best || !p.best.ms)) return null;
  let found = null;
  for (const text of timesOf(all[0]).keys()) {
    const regrets = all.map((p) => (timesOf(p).get(text) ?? Infinity) / p.best.ms), regret = Math.max(...regrets);
    if (regret < (found ? found.regret : Infinity)) found = { text, regret: Math.max(1, regret) };
  }
  return found;
}

function drawElsewhere(all) {
  const host = clear($("elsewhere")), some = all.filter((p) => p.best && p.best.ms).slice(0, MOST_ELSEWHERE);
  const texts = [...new Set(some.map(bestTextOf))];
  if (some.length < 2 || texts.length < 2) return;
  host.append(el("h3", { text: "Each winner on the other problems" }),
    el("p", { class: "finding", text: "Time of a config divided by that of the problem's own winner; blank where it was not measured." }),
    el("div", { class: "card scroll" }, el("table", { class: "map regrets" },
      el("caption", { class: "visually-hidden", text: "Slowdown of each winning config on each problem" }),
      el("thead", {}, el("tr", {}, el("td", { class: "corner", text: "config ↓  problem →" }), some.map((p) => el("th", { scope: "col", text: p.label })))),
      el("tbody", {}, texts.map((text) => el("tr", {}, el("th", { scope: "row", class: "mono", text }), some.map((p) => {
        const ms = timesOf(p).get(text);
        if (ms === undefined) return el("td", { class: "none" }, el("span", { class: "visually-hidden", text: "not measured" }));
        const ratio = Math.max(1, ms / p.best.ms), own = bestTextOf(p) === text;
        const cell = el("td", {}, el("span", { class: `cell${own ? " won" : ""}`, text: ratio.toFixed(2) }));
        shade(cell.firstChild, colourAt(Math.log(ratio) / Math.log(2)));
        return cell;
      })))))));
}
