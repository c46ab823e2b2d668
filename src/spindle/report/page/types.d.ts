// The report's data (spindle.report.page_data writes it), and what the page makes of it. Version 1.

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
interface ReportCurve { name: string; degree: number; devices: number[]; seconds: number[]; chosen: number[]; ops: number }
interface ReportSteps {
  steps: number[];
  series: { [tag: string]: (number | null)[] };
  plans: { step: number; planner: string; predicted: number | null }[];
}
interface Report {
  spindle: "report"; version: number; kind: "step"; title: string;
  kinds: string[]; classes: string[]; groups: string[]; tasks: string[]; colours: string[];
  programs: ReportProgram[];
  timelines: ReportTimeline[];
  curves: { module: string; curves: ReportCurve[]; more: number }[];
  steps: ReportSteps | null;
  assumptions: string[];
  attachments: string[];
  columns: [string, number, number][];
}

// Spans [from, to) of one lane of one device.
interface Row { lane: number; from: number; to: number }
// A timeline unpacked: columns by span, which stand in the order of rank, lane and start. Times are nanoseconds.
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
}
// What is painted between two heights: spans of a row, or the memory of a device.
interface Band {
  top: number; height: number; kind: "compute" | "communication" | "memory";
  spans: Spans; rank: number; from: number; to: number;
  other: { spans: Spans; from: number; to: number } | null;
}
interface Block { top: number; height: number; label: string; ranks: number[]; spans: Spans }
interface Layout { bands: Band[]; blocks: Block[]; height: number }
interface Theme { idle: number; after: number; text: string; quiet: string; line: string; accent: string; background: string }
interface Palette { fill: Uint32Array; stripe: Uint32Array; bySpan: boolean }

declare class uPlot {
  constructor(options: object, data: any[], target: HTMLElement);
  destroy(): void;
  setSize(size: { width: number; height: number }): void;
  static paths: any;
}
interface Window { spindleReport: any }
