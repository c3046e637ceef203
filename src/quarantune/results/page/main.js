// Draws the page for one problem, again when the window, the theme or the selection changes.
const decoded = [];
const problemAt = (i) => (decoded[i] ??= decode(data.problems[i]));
const problems = () => data.problems.map((_, i) => problemAt(i));
const several = data.problems.length > 1;

function drawCharts() {
  drawRules();
  drawWinner();
  if (!problem.trials.length) return;
  drawFinals();
  drawScatter();
  drawProgress();
  drawMap();
  drawEffects();
  drawBits();
  drawParallel();
}

function show(i) {
  problem = problemAt(i);
  problem.trialsPaused = data.problems[i].trials.paused;
  clearBrushes();
  selection.hidden.clear();
  selection.words = "";
  $("filter").value = "";
  $("fastest").value = 100;
  $("problem").value = i;
  $("subtitle").textContent = [problem.label, problem.label.endsWith(` on ${problem.device}`) ? "" : problem.device, problem.created && `${problem.state ? "begun" : "tuned"} ${problem.created.replace("T", " ").slice(0, 16)} UTC`, problem.commit && `commit ${problem.commit}`, problem.versions].filter(Boolean).join(" · ");
  $("details").hidden = !problem.trials.length;
  setUpTable();
  filterRows();
  if (several) drawShapes();
  drawWinner();
  if (problem.trials.length) {
    drawFinals();
    setUpScatter();
    drawProgress();
    setUpMap();
    drawEffects();
    drawBits();
    setUpParallel();
    drawRows();
  }
}

listeners.push(() => {
  filterRows();
  view.page = 0;
  drawRows();
  if (geometry) drawLines();
  if (!selection.time) $("fastest").value = 100;
  $("fastest-value").textContent = $("fastest").value === "100" ? "all" : `${$("fastest").value} %`;
});

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = theme === "dark" ? "Light" : "Dark";
  $("theme").setAttribute("aria-label", theme === "dark" ? "Switch to light colours" : "Switch to dark colours");
  readColours();
}
const prefersDark = matchMedia("(prefers-color-scheme: dark)");
const redraw = () => { drawCharts(); if (several) drawShapes(); };
setTheme(prefersDark.matches ? "dark" : "light");
prefersDark.addEventListener("change", () => { setTheme(prefersDark.matches ? "dark" : "light"); redraw(); });
$("theme").addEventListener("click", () => { setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"); redraw(); });

$("title").textContent = data.title;
$("about").textContent = `${plural(data.problems.reduce((sum, p) => sum + p.trials.n, 0), "trial")} of ${plural(data.problems.length, "problem")}. This page needs no network.`;
drawRules();
$("problem-label").hidden = !several;
$("problem").append(...data.problems.map((p, i) => el("option", { value: i, text: p.label })));
$("problem").addEventListener("change", (event) => show(Number(event.target.value)));
show(Math.max(0, data.problems.findIndex(({ when }) => when === "after")));
let width = document.body.clientWidth, waiting = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === width) return;
  width = document.body.clientWidth;
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(drawCharts);
}).observe(document.body);
performance.mark("quarantune-ready");
document.documentElement.dataset.ready = "true";
