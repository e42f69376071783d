const HEAD = 24; // pixels above a plot in its picture, for its name

/** Offer a file to the user, as the browser does with downloads. */
export function offerFile(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name.replace(/[^\w.-]+/g, "-");
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Offer a plot as a picture, with its name above it and on the background of the page. */
export function downloadPng(canvas, title, theme) {
  const picture = document.createElement("canvas");
  const ratio = canvas.clientWidth ? canvas.width / canvas.clientWidth : 1;
  [picture.width, picture.height] = [canvas.width, canvas.height + HEAD * ratio];
  const context = picture.getContext("2d");
  context.fillStyle = theme.ground;
  context.fillRect(0, 0, picture.width, picture.height);
  Object.assign(context, { fillStyle: theme.ink, font: `600 ${12 * ratio}px ${theme.font}`, textBaseline: "middle" });
  context.fillText(title, 6 * ratio, (HEAD / 2) * ratio);
  context.drawImage(canvas, 0, HEAD * ratio);
  picture.toBlob((blob) => blob && offerFile(blob, `${title}.png`), "image/png");
}
