export const RUN_STATES = {
  starting: { word: "starting", tone: "quiet", shape: "ring" },
  running: { word: "running", tone: "live", shape: "disc" },
  waiting: { word: "waiting", tone: "warn", shape: "hourglass" },
  stopping: { word: "stopping", tone: "warn", shape: "square" },
  done: { word: "done", tone: "good", shape: "check" },
  failed: { word: "failed", tone: "bad", shape: "cross" },
  stopped: { word: "stopped", tone: "quiet", shape: "square" },
  lost: { word: "lost", tone: "warn", shape: "dash" },
};

export const NOT_RESPONDING = { word: "not responding", tone: "warn", shape: "dash" };

export const RANK_STATES = {
  starting: RUN_STATES.starting,
  running: { word: "training", tone: "live", shape: "disc" },
  waiting: { word: "waiting in a collective", tone: "warn", shape: "hourglass" },
  saving: { word: "saving", tone: "live", shape: "arrow" },
  asking: { word: "waiting for input", tone: "warn", shape: "diamond" },
  returned: RUN_STATES.done,
  failed: RUN_STATES.failed,
  stopped: RUN_STATES.stopped,
};

export const ENDED_RANKS = new Set(["returned", "failed", "stopped"]);

export const UNKNOWN_STATE = { word: "unknown", tone: "quiet", shape: "dash" };

// Words, letters, colours (in monitor.css) and order are those of notebook_launcher/drawing/timeline.py.
export const PHASES = {
  data: { letter: "D", word: "data" },
  forward: { letter: "F", word: "forward" },
  backward: { letter: "B", word: "backward" },
  sync: { letter: "S", word: "sync" },
  step: { letter: "O", word: "optimizer" },
};
