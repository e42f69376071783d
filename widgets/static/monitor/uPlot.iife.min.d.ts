/** uPlot 1.6.32, https://github.com/leeoniya/uPlot, as it is published; `plot.js` alone uses it. */
export const uPlot: any;
