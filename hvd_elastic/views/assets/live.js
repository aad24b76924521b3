"use strict";
(() => {
  const status = document.getElementById("live");
  const parts = new Map([...document.querySelectorAll("[data-part]")].map((each) => [each.dataset.part, each]));
  const withCharts = new Set(["plots", "batch"]);
  let names = [...document.querySelectorAll(".chart")].map((each) => each.dataset.name).join();
  const source = new EventSource(document.body.dataset.events);
  source.onmessage = (message) => {
    const { html, data, live } = JSON.parse(message.data);
    const now = data ? data.charts.map((chart) => chart.name).join() : "";
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
  source.onerror = () => { status.textContent = "no connection to the dashboard; trying again"; };
})();
