// Several problems of one function: the choice of each, and how each choice does on the others.
const MOST_ELSEWHERE = 24;

function drawShapes() {
  const all = problems();
  $("shapes").hidden = all.length < 2;
  if (all.length < 2) return;
  if (all.some((p) => p.when)) drawPairs(all);
  else drawChoices(all);
}

// One row for each call of a comparison: before, after, and the gain.
function drawPairs(all) {
  const calls = [...new Set(all.map(callOf))].map((call) => [call, ...["before", "after"].map((when) => all.find((p) => callOf(p) === call && p.when === when))]);
  const gains = calls.map(([, before, after]) => (before?.bestMs && after?.bestMs ? before.bestMs / after.bestMs : null));
  const count = (is) => gains.filter((gain) => gain !== null && is(gain)).length;
  const parts = [[count((gain) => gain > LEVEL), "faster"], [count((gain) => gain < 1 / LEVEL), "slower"], [count((gain) => gain <= LEVEL && gain >= 1 / LEVEL), "as fast as before"], [gains.filter((gain) => gain === null).length, "not known"]];
  $("shapes-title").textContent = "Before and after";
  $("shapes-finding").textContent = `Of ${plural(calls.length, "call")}: ${parts.filter(([n]) => n).map(([n, what]) => `${n.toLocaleString("en")} ${what}`).join(", ")}.`;
  const cell = (p) => el("td", { class: "number", text: p && p.bestMs !== null ? p.ms(p.bestMs) : "–" });
  clear($("shapes-table")).append(el("table", { class: "shapes" },
    el("caption", { class: "visually-hidden", text: "Each call before and after" }),
    el("thead", {}, el("tr", {}, ["call", "before", "after", "gain", "choice"].map((name, i) => el("th", { scope: "col", class: i && i < 4 ? "number" : null, text: name })))),
    el("tbody", {}, calls.map(([call, before, after], row) => {
      const shown = after ?? before;
      return el("tr", { class: problem === before || problem === after ? "won" : null },
        el("th", { scope: "row" }, el("button", { type: "button", class: "link", "aria-current": problem === shown ? "true" : null, text: call, onclick: () => show(all.indexOf(shown)) })),
        cell(before), cell(after), el("td", { class: "number", text: gainText(gains[row]) }), el("td", { class: "choice", text: choiceText(before, after) }));
    }))));
  drawElsewhere(all);
}
const LEVEL = 1.005;
const gainText = (gain) => (gain === null ? "not known" : gain > LEVEL ? `${times(gain)} faster` : gain < 1 / LEVEL ? `${times(1 / gain)} slower` : "as fast as before");
// How the choice has changed, by the tunables that differ.
function choiceText(before, after) {
  if (!before || !after) return `only ${before ? "before" : "after"}`;
  const names = [...new Set([...before.choice, ...after.choice].map(([name]) => name))].filter((name) => choiceOf(before, name) !== choiceOf(after, name));
  return names.map((name) => `${name} ${choiceOf(before, name) || "unset"} → ${choiceOf(after, name) || "unset"}`).join(", ") || "the same";
}

function drawChoices(all) {
  const names = [...new Set(all.flatMap((p) => p.choice.map(([name]) => name)))];
  const distinct = new Set(all.map((p) => p.bestText)).size;
  const moving = names.filter((name) => new Set(all.map((p) => choiceOf(p, name))).size > 1);
  const universal = oneForAll(all);
  $("shapes-title").textContent = "How the choice changes with the problem";
  $("shapes-finding").textContent = (distinct === 1 ? `One config wins for all ${all.length} problems. `
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
  return el("td", { class: "number gain-cell" }, bar, times(gain));
}

// The times of configs that were measured, by their text.
function timesOf(p) {
  p.byText ??= new Map(p.timed.filter((t) => t.kind !== "at least").map((t) => [configText(p, t), t.ms]));
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
    el("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Each winner on the other problems" }, el("table", { class: "map regrets" },
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
