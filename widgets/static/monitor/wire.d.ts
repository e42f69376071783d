/**
 * Messages between Python and the page, as JSON.
 *
 * In `widgets/monitor/`, `feed.py` makes the messages of Python and their items. A number
 * that is not finite is null. This file is for the type checker alone; the browser does not load it.
 */

/** A value that JSON has as a finite number or null. */
export type Value = number | null;

/** The whole run; the answer to `Hello`. */
export interface Reset extends Required<Omit<News, "type">> {
  type: "reset";
  legend: LegendItem;
}

/** News since the last message. `run` and each entry of `ranks` replace their predecessors; the rest is appended. */
export interface Update extends News {
  type: "update";
}

export interface News {
  run?: RunItem;
  ranks?: RankItem[];
  /** Plots that have changed. */
  plots?: PlotItem[];
  plotting?: PlottingItem;
  zoomed?: ZoomedItem[];
  files?: FileItem[];
  pictures?: PictureItem[];
  lanes?: LaneItem[];
  /** Memory and load; a step is a second. */
  usage?: PlotItem[];
  logs?: LogItem[];
  errors?: ErrorsItem;
  notices?: string[];
  /** All settings, as they are now. */
  settings?: SettingItem[];
  changes?: ChangeItem[];
  answers?: AnswerItem[];
  findings?: FindingItem[];
}

export type Topic = keyof News;

/** Messages of the page. `page` differs after a reload. */
export type PageMessage = 
  | { type: "hello"; page: string }
  | { type: Action }
  | { type: "set"; name: string; value: string }
  | { type: Measure; amount: number }
  | { type: "zoom"; key: string; low: number; high: number }
  | { type: "csv"; page: string }
  /** Draw otherwise; `turn` counts these requests. */
  | { type: "draw"; axis: string; grouped: boolean; average: boolean | null; log: boolean; smoothing: number; turn: number };

export type Measure = "sample" | "profile";

export type Action = "stop" | "interrupt" | "stacks" | "save" | "pause" | "resume";

export interface RunItem {
  /** Missing before the first message, when only the name is known. */
  id?: string;
  name?: string;
  state?: string;
  summary?: string;
  arguments?: string;
  /** Seconds since the launch. */
  seconds?: number;
  num_processes?: number;
  is_over?: boolean;
  error?: string;
  /** The collective that ranks wait in, and the ranks that do not come; empty if none waits for long. */
  waiting?: string;
  effective_batch?: string;
  /** Time until the end of the run, in words; empty if it is not known. */
  left?: string;
  progress?: ProgressItem | null;
  /** The buttons that can be used now. */
  actions?: Record<Action | Measure | "set", boolean>;
  /** Why settings cannot be changed, and the run not paused; empty if they can. */
  change_hint?: string;
  action_hint?: string;
  /** True if the run goes on without this kernel. */
  outlives?: boolean;
  /** What stands beside the buttons if the kernel ends. */
  lost_hint?: string;
  /** How long ranks waited for each other, in words. */
  sync?: string;
}

export interface Done {
  done: number | null;
  total: number | null;
}

/** Progress of the slowest rank. */
export interface ProgressItem extends Done {
  /** What is done, in words. */
  text: string;
  /** The rate and the time left, in words. */
  pace: string;
}

export interface RankItem extends Done {
  rank: number;
  state: string;
  reason: string;
  last_line: string;
  slowest: boolean;
  /** Numbers in words. */
  words: Record<"step" | "samples_per_second" | "memory" | "gpu_memory" | "gpu_utilization" | "done", string>;
}

/** What stands on the horizontal axis. */
export type AxisKind = "step" | "time" | "epoch";

/** A plot that is new or has changed. */
export interface PlotItem {
  key: string;
  title: string;
  /** Names of its metrics. */
  names: string[];
  /** First part of the title, by which plots are put together; empty if it has one part. */
  section: string;
  /** The last value in words; empty if each line has its own. */
  latest: string;
  lines: LineItem[];
}

/** New points of a line, behind the first `keep` ones that the page has. */
export interface LineItem {
  label: string;
  style: number;
  /** The rank, which can be hidden; null for a mean. */
  rank: number | null;
  latest: string;
  keep: number;
  /** Places on the horizontal axis, growing. */
  x: number[];
  y: Value[];
  /** The smoothed values, if there is a smoothing. */
  smooth?: Value[];
  /** The lowest and highest rank around a mean. */
  low?: Value[];
  high?: Value[];
}

/** A plot between two places, as fine as it was reported. */
export interface ZoomedItem {
  key: string;
  range: [low: number, high: number];
  lines: Omit<LineItem, "rank" | "latest">[];
}

/** How the kernel draws the plots. */
export interface PlottingItem {
  axis: AxisKind;
  grouped: boolean;
  average: boolean;
  smoothing: number;
  /** Keys of all plots. */
  order: string[];
  can_group: boolean;
  has_epochs: boolean;
  /** Ranks of the metric that most ranks report. */
  num_ranks: number;
  /** Places at which settings were changed, with words. */
  marks: [place: number, words: string][];
  /** Number of the last request to draw otherwise. */
  turn: number;
}

/** A file that one page has asked for. */
export interface FileItem {
  page: string;
  name: string;
  text: string;
}

/** An image or histogram that a rank reported, or a table that it logged. */
export interface PictureItem {
  name: string;
  rank: number;
  step: number;
  /** Of a table: the names of its columns, then its first rows. */
  rows?: string[][];
  /** A data URL. */
  source: string;
}

/** A phase, its start and its length, in seconds since the launch. */
export type Span = [phase: string, start: number, seconds: number];

export interface LaneItem {
  rank: number;
  spans: Span[];
}

export interface LogItem {
  rank: number;
  text: string;
}

export type SettingKind = "positive" | "optional" | "count" | "number" | "integer" | "switch";

/** A setting that can be changed during the run. */
export interface SettingItem {
  name: string;
  text: string;
  kind: SettingKind;
  /** What its field takes, as a regular expression and in words, and an example. */
  pattern: string;
  takes: string;
  example: string;
}

/** A setting that was changed, and by whom, in words. */
export interface ChangeItem {
  name: string;
  words: string;
  who: string;
}

/** The answer to a request to change a setting; an empty problem: it was passed on. */
export interface AnswerItem {
  name: string;
  problem: string;
}

/** Where time went: a drawing of sampled stacks, or the tables of a profile; else the reason why there is none. */
export interface FindingItem {
  kind: Measure;
  /** An `<svg>`; empty if there is none. */
  drawing: string;
  /** `trace` is the path of a file, `trace_data` the file as base64; empty if it is too large for the page. */
  tables: { head: string; columns: string[]; rows: string[][]; trace: string; trace_data: string; notes: string[] }[];
  problem: string;
}

/** All errors, as they are now: the ranks that failed as a consequence are below a title. */
export interface ErrorsItem {
  culprits: ErrorItem[];
  victims: ErrorItem[];
  victims_title: string;
}

/** Errors that differ in the rank and its output alone. */
export interface ErrorItem {
  who: string;
  summary: string;
  traceback: string;
  outputs: [title: string, lines: string][];
}

/** The tables of `drawing/legend.py`. */
export interface LegendItem {
  phases: Record<string, PhaseLook>;
  run_states: Record<string, StateLook>;
  rank_states: Record<string, StateLook>;
  limits: Limits;
  rank_columns: { title: string; name: string; is_optional?: boolean; hint?: string }[];
  actions: Record<Action, [label: string, title: string]>;
  measures: { kind: Measure; label: string; unit: string; amount: number; max: number; title: string }[];
}

export interface PhaseLook {
  letter: string;
  word: string;
  colour: string;
}

export interface StateLook {
  word: string;
  tone: string;
  shape: string;
  /** True if a rank in this state has ended. */
  is_over?: boolean;
}

export interface Limits {
  plots: number;
  separate_ranks: number;
  unsearched_metrics: number;
  tooltip_rows: number;
  spans: number;
  pictures: number;
  lanes: number;
  lines: number;
  line_characters: number;
  shown_lines: number;
  notices: number;
  silent_seconds: number;
}
