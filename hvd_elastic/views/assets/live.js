"use strict";
(() => {
  const status = document.getElementById("live");
  const parts = new Map([...document.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
  const withCharts = new Set(["plots", "batch"]);
  let names = [...document.querySelectorAll(".chart")].map((each) => each.dataset.name).join();
  // Of a part with pieces only those are replaced: what is between them keeps its focus.
  function replace(part, text) {
    const fresh = document.createElement("template");
    fresh.innerHTML = part.shown = text;
    const [now, next] = [part, fresh.content].map((each) => [...each.querySelectorAll("[data-piece]")]);
    if (!now.length || now.length !== next.length) return exchange(part, fresh.content);
    now.forEach((piece, k) => { if (piece.innerHTML !== next[k].innerHTML) exchange(piece, next[k]); });
  }
  // What the user has ticked, scrolled to and focused stays.
  const focusable = "a, button, input, summary, [tabindex]";
  function exchange(place, next) {
    const ticked = new Set([...place.querySelectorAll("input:checked")].map((each) => each.value));
    const scrolled = [...place.querySelectorAll(".table")].map((each) => each.scrollLeft);
    const focused = [...place.querySelectorAll(focusable)].indexOf(document.activeElement);
    place.replaceChildren(...next.childNodes);
    for (const each of place.querySelectorAll("input")) each.checked = ticked.has(each.value);
    place.querySelectorAll(".table").forEach((each, k) => { each.scrollLeft = scrolled[k] ?? 0; });
    if (focused >= 0) place.querySelectorAll(focusable)[focused]?.focus({ preventScroll: true });
  }
  let source = null;
  let gone = false;
  function listen() {
    source = new EventSource(document.body.dataset.events);
    source.onmessage = show;
    source.onerror = () => { status.textContent = "no connection to the dashboard; trying again"; };
    source.addEventListener("gone", (message) => {
      gone = true;
      source.close();
      status.textContent = JSON.parse(message.data);
    });
  }
  // Browsers open six connections to a server at most, for all tabs together.
  function follow() {
    source?.close();
    if (!document.hidden && !gone) listen();
  }
  function show(message) {
    const { html, data, live } = JSON.parse(message.data);
    const now = data ? data.charts.map((chart) => chart.name).join() : names;
    const replaced = data && now !== names;
    for (const [name, text] of Object.entries(html)) {
      const part = parts.get(name);
      // Charts are kept and given new points; they would lose their zoom.
      if (!part || (withCharts.has(name) && !replaced)) continue;
      if (part.shown !== text) replace(part, text);
    }
    names = now;
    if (data) window.updateReport(data, replaced);
    status.textContent = live;
  }
  window.fetchPoints = async (plot, name) => {
    const { min, max } = plot.scales.x;
    const place = new URL(document.body.dataset.events, location.href);
    place.pathname = place.pathname.replace(/events$/, `charts/${encodeURIComponent(name)}`);
    place.searchParams.set("from", min);
    place.searchParams.set("to", max);
    try {
      const answer = await fetch(place);
      const found = answer.ok ? await answer.json() : null;
      const same = plot.scales.x.min === min && plot.scales.x.max === max;
      if (found && same && plot.zoomed) plot.showPart(found.x, found.lines);
    } catch { /* the coarse points stay */ }
  };
  const controls = document.querySelector("[data-control]");
  for (const form of controls ? controls.querySelectorAll("form") : []) {
    form.addEventListener("submit", async (event) => {
      event.preventDefault();
      const asked = { op: form.dataset.op, ...Object.fromEntries(new FormData(form)) };
      if (asked.np) asked.np = Number(asked.np);
      if (asked.op === "stop" && !confirm("Stop the run?")) return;
      const told = document.getElementById("told");
      told.textContent = "asking the leader …";
      try {
        const answer = await fetch(controls.dataset.control, { method: "POST", body: JSON.stringify(asked) });
        told.textContent = await answer.text();
      } catch (error) {
        told.textContent = String(error);
      }
    });
  }
  document.addEventListener("visibilitychange", follow);
  follow();
})();
