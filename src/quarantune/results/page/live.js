// Loads the page of a running sweep again, since its file is written again until the sweep has ended.
const kept = (() => {  // a browser may refuse to keep anything for a file
  const name = `quarantune ${location.pathname}`;
  return {
    get: () => { try { return JSON.parse(sessionStorage.getItem(name)) || {}; } catch { return {}; } },
    set: (value) => { try { sessionStorage.setItem(name, JSON.stringify(value)); } catch { /* the page starts afresh */ } },
  };
})();

if (data.reloadS) {
  const before = kept.get();
  let paused = false, touched = 0;
  const label = data.problems.map((p) => p.label);
  if (before.theme && before.theme !== document.documentElement.dataset.theme) $("theme").click();
  if (label.includes(before.problem) && label.indexOf(before.problem)) show(label.indexOf(before.problem));
  if (before.words) { $("filter").value = before.words; $("filter").dispatchEvent(new Event("input", { bubbles: true })); }
  if (before.top) addEventListener("load", () => scrollTo(0, before.top));
  $("pause").hidden = $("live").hidden = false;
  $("pause").addEventListener("click", () => {
    paused = !paused;
    $("pause").textContent = paused ? "Resume" : "Pause";
    tell();
  });
  for (const kind of ["pointerdown", "keydown", "wheel"]) addEventListener(kind, (event) => { if (event.target !== $("pause")) touched = Date.now(); }, { passive: true });
  // Nobody is interrupted who types, chooses, or reads the details of a trial.
  const isBusy = () => Date.now() - touched < 3000 || view.open.size > 0 || document.activeElement?.matches("input, select")
    || document.querySelector("details[open]") !== null || getSelection()?.toString();
  const tell = () => {
    const age = Math.max(0, Math.round(Date.now() / 1000 - data.writtenS));
    const more = paused ? "paused" : isBusy() ? "stands while you look at it" : age > 15 ? `${seconds(age)} ago: does quarantune report --watch still run?` : "";
    $("live").textContent = [`as of ${new Date(1000 * data.writtenS).toLocaleTimeString()}`, more].filter(Boolean).join(", ");
  };
  tell();
  setInterval(() => {
    tell();
    if (paused || isBusy()) return;
    kept.set({ theme: document.documentElement.dataset.theme, problem: problem.label, words: $("filter").value, top: scrollY });
    location.reload();
  }, 1000 * data.reloadS);
}
