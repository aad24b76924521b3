"use strict";
(() => {
  const status = document.getElementById("live");
  const parts = new Map([...document.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
  const withCharts = new Set(["plots", "batch"]);
  let names = [...document.querySelectorAll(".chart")].map((each) => each.dataset.name).join();
  const source = new EventSource(document.body.dataset.events);
  source.onmessage = (message) => {
    const { html, data, live } = JSON.parse(message.data);
    const now = data ? data.charts.map((chart) => chart.name).join() : names;
    const replaced = data && now !== names;
    for (const [name, text] of Object.entries(html)) {
      const part = parts.get(name);
      // Charts are kept and given new points; they would lose their zoom.
      if (!part || (withCharts.has(name) && !replaced)) continue;
      if (part.shown !== text) part.innerHTML = part.shown = text;
    }
    names = now;
    if (data) window.updateReport(data, replaced);
    status.textContent = live;
  };
  source.addEventListener("gone", (message) => {
    source.close();
    status.textContent = JSON.parse(message.data);
  });
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
      if (found && same && plot.zoomed) plot.setData([found.x, ...found.lines], false);
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
  source.onerror = () => { status.textContent = "no connection to the dashboard; trying again"; };
})();
