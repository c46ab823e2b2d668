// The report's data (spindle.report.page_data and fleet_page write it), and what the page makes of it. Version 2.

interface ReportProgram {
  names: string[];
  kinds: number[];      // positions in Report.kinds
  groups: number[];     // positions in Report.groups (modules), -1 for none
  tasks: number[];      // positions in Report.tasks, -1 for none
  details: string[];
  recompute: number[];  // the share of an instruction's time that computes activations again
}
interface ReportTimeline {
  name: string; measured: boolean; program: number; planner: string; workload: string; cluster: string;
  numRanks: number; numSpans: number; makespan: number; bound: number; memoryLimit: number; settings: string;
}
// A timeline of a fleet: groups are jobs, tasks are teams; attempts, jobs and rounds are columns.
interface FleetHeader extends ReportTimeline {
  nodes: [string, string, number][];                       // name, kind, devices
  measures: { [name: string]: number };
  reasons: string[];
  waits: [number, number, number, number][];               // job, from, to, position in reasons
  faults: [string, number, number][];                      // node, from, to
  cells: { [job: string]: [number, number, number, number, number][] };  // kind, devices, stages, seconds, grade (-1: does not fit)
  phases: string[];
}
interface FleetData {
  header: FleetHeader;
  attempts: { job: Float64Array; number: Float64Array; kind: Float64Array; devices: Float64Array; start: Float64Array; ready: Float64Array; end: Float64Array; lost: Float64Array; estimated: Float64Array; step: Float64Array; rate: Float64Array };
  jobs: { number: Float64Array; team: Float64Array; phase: Float64Array; arrival: Float64Array; completion: Float64Array; wait: Float64Array; reallocations: Float64Array };
  rounds: { time: Float64Array; waiting: Float64Array; utility: Float64Array; bound: Float64Array; prices: Float64Array[] };
  kinds: string[];
  devices: { node: string; kind: number; place: number }[];  // by rank
  place: Map<number, number>;                              // of a job in `jobs`
  attemptsOf: Map<number, number[]>;
  waitsOf: Map<number, [number, number, number, number][]>;
}
interface ReportCurve { name: string; degree: number; devices: number[]; seconds: number[]; measured: number[]; chosen: number[]; ops: number }
interface ReportSteps {
  steps: number[];
  series: { [tag: string]: (number | null)[] };
  plans: { step: number; planner: string; predicted: number | null }[];
}
interface Report {
  spindle: "report"; version: number; kind: "step" | "fleet"; title: string;
  unit: number;         // seconds of a unit of time
  kinds: string[]; classes: string[]; groups: string[]; tasks: string[]; colours: string[];
  programs: ReportProgram[];
  timelines: ReportTimeline[];
  curves: { module: string; curves: ReportCurve[]; more: number }[];
  steps: ReportSteps | null;
  assumptions: string[];
  attachments: string[];
  grades?: string[];    // of estimates, of a fleet
  columns: [string, number, number][];
}

// Spans [from, to) of one lane of one device.
interface Row { lane: number; from: number; to: number }
// A timeline unpacked: columns by span, which stand in the order of rank, lane and start. Times are nanoseconds, of a
// fleet microseconds.
interface Spans {
  header: ReportTimeline;
  program: ReportProgram;
  rank: Int32Array; lane: Int32Array; instruction: Int32Array;
  start: Float64Array; end: Float64Array; waited: Float64Array;
  reach: Float64Array;   // the latest end up to this span, in its row
  after: Int32Array;     // the span that it waited for last, -1 for none
  bytesAtStart: Float64Array; bytesAtEnd: Float64Array; staticBytes: Float64Array;
  rows: Row[][];         // by rank
  hasMemory: boolean;
  fleet?: FleetData;
}
// What is painted between two heights: spans of a row, or the memory of a device.
interface Band {
  top: number; height: number; kind: "compute" | "communication" | "memory";
  spans: Spans; rank: number; from: number; to: number;
  other: { spans: Spans; from: number; to: number } | null;
}
interface Block { top: number; height: number; label: string; ranks: number[]; spans: Spans }
interface Layout { bands: Band[]; blocks: Block[]; titles: { top: number; text: string }[]; height: number }
interface Theme { idle: number; after: number; text: string; quiet: string; line: string; accent: string; background: string }
interface Palette { fill: Uint32Array; stripe: Uint32Array; bySpan: boolean }

declare class uPlot {
  constructor(options: object, data: any[], target: HTMLElement);
  destroy(): void;
  setSize(size: { width: number; height: number }): void;
  static paths: any;
}
interface Window { spindleReport: any }
