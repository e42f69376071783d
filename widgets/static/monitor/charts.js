/** @import { Curve, Metric } from "./series.js" */
/** @import { ChangeItem } from "./wire" */

/** What a plot has on its horizontal axis. @typedef {"step" | "time" | "epoch"} AxisKind */

/** Words for a part of the data, at the beginning or the end of a metric's name: train/loss, loss/val, eval_loss. */
const PART = "train|training|val|valid|validation|eval|evaluation|test|dev";
const FIRST = new RegExp(`^(${PART})[/_](.+)$`, "i");
const LAST = new RegExp(`^(.+)[/_](${PART})$`, "i");

/** Metrics that are drawn in one plot: one, or the same quantity of several parts of the data. */
export class Chart {
  /** @param {string} name @param {{ part: string, metric: Metric }[]} members */
  constructor(name, members) {
    this.name = name;
    this.members = members;
    /** Changes with every point. */
    this.version = members.reduce((sum, { metric }) => sum + metric.version, 0);
  }

  /** @param {Chart} other */
  equals({ members, version }) {
    const isSame = members.length === this.members.length && version === this.version;
    return isSame && members.every(({ metric }, at) => metric === this.members[at].metric);
  }
}

/**
 * Return the quantity that a metric's name is about, and its part of the data: "loss" and "train" of "train/loss".
 * @param {string} name
 */
export function splitName(name) {
  const first = FIRST.exec(name);
  if (first) return { quantity: first[2], part: first[1] };
  const last = LAST.exec(name);
  return last ? { quantity: last[1], part: last[2] } : { quantity: name, part: "" };
}

/**
 * Return the charts of these metrics, in the order in which their first members appear.
 * @param {Metric[]} metrics
 * @param {boolean} isGrouped false: a chart for each metric
 */
export function chartsOf(metrics, isGrouped) {
  /** @type {Map<string, { part: string, metric: Metric }[]>} */
  const groups = new Map();
  for (const metric of metrics) {
    const { quantity, part } = isGrouped ? splitName(metric.name) : { quantity: metric.name, part: "" };
    groups.set(quantity, [...(groups.get(quantity) ?? []), { part: part || metric.name, metric }]);
  }
  // A name alone in its group is shown whole.
  return [...groups].map(([name, members]) => new Chart(members.length > 1 ? name : members[0].metric.name, members));
}

/**
 * Return the metric that counts epochs, if there is one.
 * @param {Iterable<Metric>} metrics
 */
export function epochMetric(metrics) {
  return [...metrics].find(({ name }) => /(^|\/)epochs?$/i.test(name));
}

/**
 * Return the places of a curve's points on an axis. Between the moments at which the epoch changes, time counts its part.
 * @param {Curve} curve
 * @param {AxisKind} kind
 * @param {Metric | undefined} epochs
 * @returns {number[]}
 */
export function placesOf(curve, kind, epochs) {
  return kind === "step" ? curve.steps : curve.times.map(placeOf(kind, epochs));
}

/**
 * Return changes of settings with their places on an axis as their steps.
 * @param {ChangeItem[]} changes
 * @param {AxisKind} kind
 * @param {Metric | undefined} epochs
 */
export function placedChanges(changes, kind, epochs) {
  if (kind === "step") return changes;
  const place = placeOf(kind, epochs);
  return changes.map((change) => ({ ...change, step: change.seconds === null ? null : place(change.seconds) }));
}

/**
 * Return a function that places a time on an axis.
 * @param {AxisKind} kind
 * @param {Metric | undefined} epochs
 * @returns {(time: number) => number}
 */
function placeOf(kind, epochs) {
  const counted = kind === "epoch" ? [...(epochs?.ranks.values() ?? [])][0] : undefined;
  const changes = counted ? epochChanges(counted) : [];
  return changes.length ? (time) => epochAt(changes, time) : (time) => time;
}

/** @typedef {{ time: number, epoch: number }} EpochChange */

/**
 * Return the first report of each epoch.
 * @param {Curve} counted
 */
function epochChanges({ times, values }) {
  /** @type {EpochChange[]} */
  const changes = [];
  values.forEach((epoch, at) => {
    if (epoch !== null && epoch !== changes[changes.length - 1]?.epoch) changes.push({ time: times[at], epoch });
  });
  return changes;
}

/**
 * Return the epoch at a time. Before the first and after the last change, epochs are as long as their neighbours.
 * @param {EpochChange[]} changes
 * @param {number} time
 */
function epochAt(changes, time) {
  const next = changes.findIndex((change) => change.time > time);
  const at = Math.min(Math.max(1, next < 0 ? changes.length : next), changes.length - 1);
  if (at < 1) return changes[0].epoch;
  const [before, after] = [changes[at - 1], changes[at]];
  const perSecond = (after.epoch - before.epoch) / Math.max(after.time - before.time, 1e-9);
  const epoch = before.epoch + (time - before.time) * perSecond;
  return Math.min(Math.max(epoch, changes[0].epoch - 1), changes[changes.length - 1].epoch + 1);
}
