"use strict";
(() => {
  let run = JSON.parse(document.getElementById("run-data").textContent);
  const color = (name) =>
    getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const font = (size) => size + "px system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif";

  const two = (n) => String(n).padStart(2, "0");
  function clock(seconds, fine) {
    const whole = Math.floor(seconds);
    const h = Math.floor(whole / 3600), m = Math.floor((whole % 3600) / 60);
    const rest = seconds - 3600 * h - 60 * m;
    const s = fine ? rest.toFixed(1).padStart(4, "0") : two(Math.floor(rest));
    return h ? `${h}:${two(m)}:${s}` : `${m}:${s}`;
  }
  function words(value) {
    if (value == null) return "–";
    const size = Math.abs(value);
    if (Number.isInteger(value) || size >= 1000) return Math.round(value).toLocaleString("en-US");
    return String(Number(value.toPrecision(4)));
  }
  const shortTick = (value) =>
    Math.abs(value) >= 10000 ? Number((value / 1000).toPrecision(4)) + "k" : String(Number(value.toPrecision(6)));

  // Rescales are drawn over every plot, with the number they have in the table.
  const marks = {
    hooks: {
      draw: (u) => {
        const c = u.ctx, r = devicePixelRatio, box = u.bbox;
        c.save();
        c.textAlign = "center";
        c.textBaseline = "middle";
        c.font = `600 ${11 * r}px system-ui, Arial, sans-serif`;
        let lastRight = -1e9;
        for (const mark of run.marks) {
          if (!mark.line) continue;
          const x = u.valToPos(mark.at_s, "x", true);
          if (x < box.left - 1 || x > box.left + box.width + 1) continue;
          const shade = color(mark.way);
          c.strokeStyle = shade;
          c.globalAlpha = 0.75;
          c.lineWidth = r;
          c.setLineDash([4 * r, 3 * r]);
          c.beginPath();
          c.moveTo(x, box.top);
          c.lineTo(x, box.top + box.height);
          c.stroke();
          const half = (mark.label.length > 1 ? 11 : 8.5) * r;
          // Where rescales stand close together only the first of them keeps its number.
          if (x - half < lastRight) continue;
          lastRight = x + half;
          c.globalAlpha = 1;
          c.setLineDash([]);
          c.fillStyle = shade;
          c.beginPath();
          c.roundRect(x - half, box.top - 17 * r, 2 * half, 16 * r, 8 * r);
          c.fill();
          c.fillStyle = color("card");
          c.fillText(mark.label, x, box.top - 8.5 * r);
        }
        c.restore();
      },
    },
  };

  // Steps of a clock; none that would need a fraction of a second where the label has none.
  const clockSteps = [0.001, 0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800,
    3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000];

  // Steps of what is counted.
  const countSteps = [...Array(13).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

  // Along the x axis stands time, or what run.x_name counts.
  const counts = run.x_name !== undefined;
  const at = (x, fine) => (counts ? `${x} ${run.x_name}` : clock(x, fine));

  const plots = [];

  // Under the picture of the hosts every mark is a button, which tells what happened and why.
  const strip = document.querySelector(".marks");
  const reason = document.querySelector(".reason");
  let opened = null;
  function tell(key) {
    opened = opened === key ? null : key;
    const shown = run.marks.find((mark) => mark.key === opened);
    reason.hidden = !shown;
    reason.textContent = shown ? `${clock(shown.at_s, true)}  ${shown.text}` : "";
    for (const button of strip.children) button.setAttribute("aria-expanded", String(button.dataset.key === opened));
  }
  function markButton(mark) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = `mark ${mark.way}`;
    button.textContent = mark.label;
    button.dataset.key = mark.key;
    button.setAttribute("aria-label", `${mark.what} at ${clock(mark.at_s, false)}`);
    button.setAttribute("aria-expanded", String(mark.key === opened));
    button.addEventListener("click", () => tell(mark.key));
    return button;
  }
  function placeMarks() {
    // Who has no pointer scrolls a table that is too wide by its arrow keys.
    for (const table of document.querySelectorAll(".table")) {
      if (table.scrollWidth > table.clientWidth) table.tabIndex = 0;
      else table.removeAttribute("tabindex");
    }
    if (!strip) return;
    const known = new Map([...strip.children].map((button) => [button.dataset.key, button]));
    run.marks.forEach((mark, k) => {
      const button = known.get(mark.key) ?? markButton(mark);
      known.delete(mark.key);
      if (button.textContent !== mark.label) button.textContent = mark.label;
      if (strip.children[k] !== button) strip.insertBefore(button, strip.children[k] ?? null);
    });
    known.forEach((button) => button.remove());
    if (opened !== null && !run.marks.some((mark) => mark.key === opened)) tell(opened);
    // Marks that stand close together are moved apart, from the right, where the newest are.
    const width = strip.clientWidth, whole = Math.max(run.duration_s, 0.001);
    let edge = width - 24;
    for (let k = run.marks.length - 1; k >= 0; k--) {
      const x = Math.max(0, Math.min((width * run.marks[k].at_s) / whole - 12, edge));
      edge = Math.max(0, x - 15);
      strip.children[k].style.left = `${x}px`;
    }
  }
  // A long line gets a mean over its neighbours, drawn on top of it.
  const others = (chart) => chart.more || [];
  const isSmoothed = (chart) =>
    !counts && !chart.stepped && !chart.whole && !chart.low && others(chart).every((each) => each.solid);
  const means = (chart) => (isSmoothed(chart) ? [chart, ...others(chart)].map((each) => color(each.color)) : []);
  const isLong = (values) => values.length > 150;
  function smooth(values) {
    if (!isLong(values)) return values.map(() => null);
    const half = Math.ceil(values.length / 160);
    let sum = 0, count = 0, from = 0, to = 0;
    return values.map((value, i) => {
      for (; to <= Math.min(values.length - 1, i + half); to++) if (values[to] != null) { sum += values[to]; count++; }
      for (; from < i - half; from++) if (values[from] != null) { sum -= values[from]; count--; }
      return value == null || !count ? null : sum / count;
    });
  }
  const withMeans = (chart, data) => [...data, ...means(chart).map((_, k) => smooth(data[k + 1]))];
  function lines(chart, box) {
    const y = box.dataset.log === "1" ? chart.y.map((v) => (v > 0 ? v : null)) : chart.y;
    return withMeans(chart, [chart.x, y, ...(chart.low ? [chart.low, chart.high] : []), ...(chart.more || []).map((each) => each.y)]);
  }
  function draw(chart, box) {
    const holder = box.querySelector(".plot");
    const readout = box.querySelector(".readout");
    const log = box.dataset.log === "1";
    const stroke = color(chart.color);
    const faint = (shade) => (isSmoothed(chart) ? (u) => (isLong(u.data[0]) ? shade + "55" : shade) : shade);
    const axis = {
      stroke: color("muted"), font: font(12),
      grid: { stroke: color("grid"), width: 1 }, ticks: { show: false },
    };
    const options = {
      width: Math.max(240, holder.clientWidth), height: chart.height, padding: [20, 14, 0, 0],
      legend: { show: false },
      cursor: { sync: { key: "run", setSeries: false }, points: { size: 7 }, y: false },
      scales: {
        x: {
          time: false,
          range: (u, lo, hi) => (u.zoomed ? [lo, hi] : counts ? [lo, Math.max(hi, lo + 1)] : [0, Math.max(run.duration_s, 0.001)]),
        },
        y: log ? { distr: 3 } : {
          range: (u, lo, hi) => {
            if (lo == null) return [0, 1];
            if (chart.from_zero) return [0, hi > 0 ? hi * 1.15 : 1];
            const room = (hi - lo || Math.abs(hi) || 1) * 0.08;
            return [lo >= 0 ? Math.max(0, lo - room) : lo - room, hi + room];
          },
        },
      },
      axes: [
        counts
          ? { ...axis, size: 26, space: 40, incrs: countSteps, values: (u, ticks) => ticks.map(shortTick) }
          : { ...axis, size: 26, space: 70, incrs: clockSteps, values: (u, ticks) => ticks.map((t) => clock(t, ticks.length > 1 && ticks[1] - ticks[0] < 1)) },
        {
          ...axis, size: 56, space: chart.whole ? 24 : 30,
          incrs: chart.whole ? countSteps : undefined,
          values: (u, ticks) => ticks.map((t) => (t == null ? "" : shortTick(t))),
        },
      ],
      series: [
        {},
        {
          stroke: faint(stroke),
          width: isSmoothed(chart) && isLong(chart.x) ? 1 : 2, points: { show: chart.x.length < 30 && !chart.stepped, size: 5, fill: stroke },
          paths: chart.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
          fill: chart.stepped ? stroke + "22" : undefined,
        },
        ...(chart.low ? [1, 2].map(() => ({ stroke: "transparent", points: { show: false } })) : []),
        ...others(chart).map((each) => ({
          stroke: faint(color(each.color)), width: isSmoothed(chart) && isLong(chart.x) ? 1 : 1.5,
          dash: each.solid ? [] : [6, 4], points: { show: false },
        })),
        ...means(chart).map((shade) => ({ stroke: shade, width: 2, points: { show: false } })),
      ],
      bands: chart.low ? [{ series: [3, 2], fill: stroke + "22" }] : [],
      plugins: [marks],
      hooks: {
        setCursor: [(u) => {
          const i = u.cursor.idx;
          if (i == null) return void (readout.textContent = chart.summary);
          const others = (chart.more || []).filter((each) => each.name).map((each) => words(each.y[i]));
          readout.textContent = `${at(u.data[0][i], true)}  ·  ${[words(u.data[1][i]), ...others].join(" · ")} ${chart.unit}`;
        }],
        setSelect: [(u) => { u.zoomed = u.select.width > 0; }],
        // A live page fetches the points of the part that is looked at.
        setScale: [(u, key) => {
          if (key === "x" && u.zoomed && window.fetchPoints && chart.name !== "size") window.fetchPoints(u, chart.name);
        }],
        init: [(u) => u.over.addEventListener("dblclick", () => {
          plots.forEach((plot, i) => {
            plot.zoomed = false;
            plot.setData(lines(run.charts[i], boxes[i]));
          });
        })],
      },
    };
    readout.textContent = chart.summary;
    const plot = new uPlot(options, lines(chart, box), holder);
    holder.plot = plot;
    plot.showPart = (x, found) => plot.setData(withMeans(chart, [x, ...found]), false);
    return plot;
  }

  let boxes = [];
  function drawAll() {
    while (plots.length) plots.pop().destroy();
    boxes.forEach((box, i) => plots.push(draw(run.charts[i], box)));
    document.documentElement.dataset.plots = String(plots.length);
    placeMarks();
  }
  function findBoxes() {
    boxes = [...document.querySelectorAll(".chart")];
    boxes.forEach(listen);
    drawAll();
  }
  // The points of a chart as a table, made when it is opened, and read with the arrow keys.
  const mostRows = 200;
  function fill(details, chart) {
    const step = Math.ceil(chart.x.length / mostRows);
    const named = (chart.more || []).filter((each) => each.name);
    const rows = chart.x.map((x, k) => [at(x, true), words(chart.y[k]), ...named.map((each) => words(each.y[k]))])
      .filter((_, k) => k % step === 0 || k === chart.x.length - 1);
    const table = document.createElement("table");
    for (const row of [[counts ? run.x_name : "at", chart.line || chart.unit || chart.title, ...named.map((each) => each.name)], ...rows]) {
      const line = table.insertRow();
      for (const text of row) {
        const cell = table.rows.length === 1 ? document.createElement("th") : line.insertCell();
        cell.textContent = text;
        cell.className = "n";
        line.append(cell);
      }
    }
    details.querySelector("table")?.remove();
    details.append(table);
  }
  function step(plot, by) {
    const last = plot.data[0].length - 1;
    const now = plot.cursor.idx == null ? (by > 0 ? -1 : last + 1) : plot.cursor.idx;
    const next = Math.min(last, Math.max(0, now + by));
    plot.setCursor({ left: plot.valToPos(plot.data[0][next], "x"), top: 10 });
  }
  const strides = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -1e9, End: 1e9 };

  function listen(box, i) {
    const details = box.querySelector("details");
    details.addEventListener("toggle", () => { if (details.open) fill(details, run.charts[i]); });
    box.querySelector(".plot").addEventListener("keydown", (event) => {
      if (!(event.key in strides)) return;
      event.preventDefault();
      step(plots[i], strides[event.key]);
    });
    for (const button of box.querySelectorAll("button.save")) {
      button.addEventListener("click", () => window.savePicture(plots[i], run.charts[i], run.marks, button.dataset.kind));
    }
    const button = box.querySelector("button.log");
    if (!button) return;
    button.addEventListener("click", () => {
      const on = box.dataset.log !== "1";
      box.dataset.log = on ? "1" : "0";
      button.setAttribute("aria-pressed", String(on));
      plots[i].destroy();
      plots[i] = draw(run.charts[i], box);
    });
  }
  findBoxes();
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    placeMarks();
    boxes.forEach((box, i) =>
      plots[i].setSize({ width: Math.max(240, box.querySelector(".plot").clientWidth), height: run.charts[i].height }));
  });
  // A live page gives newer data; a zoomed plot stays where it is.
  window.updateReport = (next, replaced) => {
    run = next;
    if (replaced) return findBoxes();
    placeMarks();
    plots.forEach((plot, i) => {
      const chart = run.charts[i];
      if (!plot.zoomed) plot.setData(lines(chart, boxes[i]));
      if (plot.cursor.idx == null) boxes[i].querySelector(".readout").textContent = chart.summary;
      const details = boxes[i].querySelector("details");
      if (details.open) fill(details, chart);
    });
  };
})();
