// Prepares a picture as `model.preprocessing` says. It has the sizes of adalog.Preprocessing, but a canvas resizes with
// filters of its own, so pixels differ from those of Pillow.

// Rounds halves to the nearest even number, as Python does.
function round(value) {
  const whole = Math.round(value);
  return Math.abs(value % 1) === 0.5 && whole % 2 ? whole - 1 : whole;
}

function resized(width, height, wants) {
  if (wants.resizeShorter) {
    const longer = Math.trunc((wants.resizeShorter * Math.max(width, height)) / Math.min(width, height));
    return width <= height ? [wants.resizeShorter, longer] : [longer, wants.resizeShorter];
  }
  if (wants.fit === "stretch") return [wants.resizeWidth, wants.resizeHeight];
  const ratios = [height / wants.resizeHeight, width / wants.resizeWidth];
  const ratio = wants.fit === "cover" ? Math.min(...ratios) : Math.max(...ratios);
  return [Math.max(round(width / ratio), 1), Math.max(round(height / ratio), 1)];
}

// Where a side of the crop begins in the resized picture; negative if the picture is padded.
function start(side, size, position) {
  if (position === "top-left") return 0;
  if (side < size) return -Math.floor((size - side) / 2);
  return position === "center-floor" ? Math.floor((side - size) / 2) : round((side - size) / 2);
}

// picture: an ImageBitmap. Returns the prepared image, a Float32Array, channels first.
export function prepare(picture, wants) {
  const { width, height } = wants;
  const [wide, high] = resized(picture.width, picture.height, wants);
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.fillStyle = wants.fill ? `rgb(${wants.fill.join(" ")})` : "white";
  context.fillRect(0, 0, width, height);
  const [left, top] = [-start(wide, width, wants.position), -start(high, height, wants.position)];
  context.fillStyle = "white"; // behind transparent pixels
  context.fillRect(left, top, wide, high);
  context.imageSmoothingEnabled = wants.interpolation !== "nearest";
  context.imageSmoothingQuality = "high";
  context.drawImage(picture, left, top, wide, high);
  const pixels = context.getImageData(0, 0, width, height).data;
  const area = width * height;
  const image = new Float32Array(3 * area);
  for (let channel = 0; channel < 3; channel++) {
    const from = wants.channels === "bgr" ? 2 - channel : channel;
    for (let i = 0; i < area; i++)
      image[channel * area + i] = (pixels[4 * i + from] * wants.rescale - wants.mean[channel]) / wants.std[channel];
  }
  return image;
}
