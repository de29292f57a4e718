"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const chart = document.getElementById("chart"), axis = document.getElementById("axis"), tip = document.getElementById("tip");
  const bars = [...chart.querySelectorAll("svg.bar")];
  const SVG = "http://www.w3.org/2000/svg", DEEPEST = 5000, PIXELS_PER_TICK = 90, LAST_PERCENT = 93;
  const STEPS = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600,
    43200, 86400, 172800, 604800];
  let from = 0, span = data.units, active = null;

  const words = (seconds) => {
    if (seconds < 1) return seconds.toFixed(2) + " s";
    if (seconds < 10) return seconds.toFixed(1) + " s";
    const whole = Math.round(seconds);
    if (whole < 60) return whole + " s";
    for (const [large, small, size, part] of [["d", "h", 86400, 3600], ["h", "m", 3600, 60], ["m", "s", 60, 1]]) {
      if (whole >= size) {
        const rest = Math.floor((whole % size) / part);
        return Math.floor(whole / size) + large + (rest ? " " + rest + small : "");
      }
    }
    return whole + " s";
  };
  const clock = (time) => new Date(time * 1000).toISOString().slice(11, 19);
  // In the zone of whoever made the page, as the times that stand on it, wherever it is read.
  const moment = (offset) => clock(data.begin + offset + data.utc_offset_s);

  const drawAxis = () => {
    const length = span / data.units * data.length, start = from / data.units * data.length;
    const most = Math.max(1, axis.clientWidth / PIXELS_PER_TICK);
    const step = STEPS.find((one) => length / one < most) || Math.ceil(length / most / 604800) * 604800;
    const found = [];
    for (let tick = Math.ceil(start / step - 1e-9) * step; tick <= start + length; tick += step) {
      const at = (tick - start) / length * 100;
      const line = document.createElementNS(SVG, "line"), text = document.createElementNS(SVG, "text");
      line.setAttribute("x1", at + "%"); line.setAttribute("x2", at + "%");
      line.setAttribute("y1", 0); line.setAttribute("y2", 18);
      const isLast = at > LAST_PERCENT;  // its words go to the left, or they were cut off
      text.setAttribute("x", at + "%"); text.setAttribute("dx", isLast ? -3 : 3); text.setAttribute("y", 12);
      if (isLast) text.setAttribute("text-anchor", "end");
      text.textContent = tick < step / 2 ? "0" : words(tick);
      found.push(line, text);
    }
    axis.replaceChildren(...found);
  };

  const show = (newFrom, newSpan) => {
    span = Math.min(data.units, Math.max(data.units / DEEPEST, newSpan));
    from = Math.min(data.units - span, Math.max(0, newFrom));
    const box = from + " 0 " + span + " 10";
    for (const bar of bars) bar.setAttribute("viewBox", box);
    drawAxis();
  };
  const zoom = (factor, around) => show(around - (around - from) * factor, span * factor);
  const middle = () => {
    if (!active) return from + span / 2;
    return Number(active.getAttribute("x")) + Number(active.getAttribute("width")) / 2;
  };
  const under = (event) => {
    const box = axis.getBoundingClientRect();
    return from + Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)) * span;
  };

  const unmark = () => {
    if (active) active.classList.remove("active");
    active = null;
    tip.classList.remove("shown");
  };
  const tell = (rect, x, y) => {
    unmark();
    active = rect;
    rect.classList.add("active");
    const row = data.rows[Number(rect.parentNode.dataset.row)];
    const [phase, begin, end, attempt] = row.spans[[...rect.parentNode.children].indexOf(rect)];
    const lines = [["b", row.label], ["div", data.phases[phase] + " for " + words(end - begin) + ", attempt " + attempt],
      ["div", moment(begin) + " to " + moment(end)], ["div", words(begin) + " to " + words(end) + " after the submission"]];
    if (row.note) lines.push(["div", row.note]);
    tip.replaceChildren(...lines.map(([tag, text]) => {
      const line = document.createElement(tag);
      line.textContent = text;
      return line;
    }));
    tip.classList.add("shown");
    const left = Math.min(x + 14, window.innerWidth - tip.offsetWidth - 8);
    const top = y + 18 + tip.offsetHeight > window.innerHeight ? y - tip.offsetHeight - 10 : y + 18;
    tip.style.left = Math.max(4, left) + "px";
    tip.style.top = Math.max(4, top) + "px";
  };
  const tellFocused = (rect) => {
    rect.parentNode.scrollIntoView({ block: "nearest" });
    const begin = Number(rect.getAttribute("x")), end = begin + Number(rect.getAttribute("width"));
    if (end < from || begin > from + span) show((begin + end) / 2 - span / 2, span);
    const box = rect.getBoundingClientRect(), frame = axis.getBoundingClientRect();
    tell(rect, Math.max(frame.left, Math.min(box.left, frame.right)), box.bottom - 8);
  };
  const rows = bars.filter((bar) => bar.dataset.row !== undefined);
  const step = (along, down) => {
    if (!active) return tellFocused(rows[0].children[0]);
    const row = Math.min(rows.length - 1, Math.max(0, rows.indexOf(active.parentNode) + down));
    const own = [...active.parentNode.children].indexOf(active);
    const spans = rows[row].children;
    tellFocused(spans[Math.min(spans.length - 1, Math.max(0, own + along))]);
  };

  const isTall = () => chart.getBoundingClientRect().height > window.innerHeight;
  chart.addEventListener("wheel", (event) => {
    // A chart that is taller than the window is scrolled; with Ctrl, or over the axis, it is zoomed.
    const wants = event.ctrlKey || !isTall() || event.target.closest(".axis");
    if (!wants || event.deltaY === 0) return;
    event.preventDefault();
    zoom(event.deltaY < 0 ? 0.8 : 1.25, under(event));
  }, { passive: false });
  chart.addEventListener("pointermove", (event) => {
    if (event.target.tagName === "rect") tell(event.target, event.clientX, event.clientY);
    else if (!event.buttons) unmark();
  });
  chart.addEventListener("pointerleave", unmark);
  let dragged = null;
  chart.addEventListener("pointerdown", (event) => { if (event.button === 0) dragged = { x: event.clientX, from }; });
  window.addEventListener("pointerup", () => { dragged = null; });
  window.addEventListener("pointermove", (event) => {
    if (dragged) show(dragged.from - (event.clientX - dragged.x) / axis.getBoundingClientRect().width * span, span);
  });
  chart.addEventListener("dblclick", () => show(0, data.units));
  chart.addEventListener("focus", () => { if (chart.matches(":focus-visible") && rows.length) step(0, 0); });
  chart.addEventListener("blur", unmark);
  const keys = {
    "+": () => zoom(0.5, middle()), "=": () => zoom(0.5, middle()), "-": () => zoom(2, middle()),
    "0": () => show(0, data.units), Escape: unmark,
    ArrowRight: () => step(1, 0), ArrowLeft: () => step(-1, 0), ArrowDown: () => step(0, 1), ArrowUp: () => step(0, -1),
  };
  chart.addEventListener("keydown", (event) => {
    const action = keys[event.key];
    if (!action || event.altKey || event.metaKey || event.ctrlKey || !rows.length) return;
    event.preventDefault();
    action();
  });
  document.getElementById("in").addEventListener("click", () => zoom(0.5, from + span / 2));
  document.getElementById("out").addEventListener("click", () => zoom(2, from + span / 2));
  document.getElementById("all").addEventListener("click", () => show(0, data.units));
  window.addEventListener("resize", drawAxis);
  window.addEventListener("beforeprint", () => { unmark(); drawAxis(); });
  if (rows.length > 40) chart.classList.add("dense");
  drawAxis();
})();
