// Prepares a picture as `model.preprocessing` says, with the sizes of adalog.Preprocessing and the filters of Pillow. A
// canvas has other filters: with its pixels, a quantized model often gives another first class.

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

// Radius and shape of each filter, as in Pillow's Resample.c.
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));
const FILTERS = {
  bilinear: [1, (x) => Math.max(1 - Math.abs(x), 0)],
  bicubic: [
    2,
    (signed) => {
      const x = Math.abs(signed);
      if (x < 1) return (1.5 * x - 2.5) * x * x + 1;
      return x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
    },
  ],
  lanczos: [3, (x) => (Math.abs(x) < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
const ONE = 1 << 22; // Pillow's factors are whole numbers

// Returns the factors of the old pixels for each of the new pixels from `first` on, of a side that is resized.
function factors(side, resized, first, count, interpolation) {
  const scale = side / resized;
  if (interpolation === "nearest") {
    const nearest = []; // Pillow adds the scale up, which rounds otherwise than a product
    for (let index = 0, center = scale / 2; index < first + count; index++, center += scale)
      nearest.push({ start: Math.min(Math.trunc(center), side - 1), values: [ONE] });
    return nearest.slice(first);
  }
  return Array.from({ length: count }, (_, index) => {
    const center = (first + index + 0.5) * scale;
    const [radius, shape] = FILTERS[interpolation];
    const widened = Math.max(scale, 1);
    const start = Math.max(Math.trunc(center - radius * widened + 0.5), 0);
    const end = Math.min(Math.trunc(center + radius * widened + 0.5), side);
    const values = Array.from({ length: end - start }, (_, i) => shape((start + i - center + 0.5) * (1 / widened)));
    const total = values.reduce((sum, value) => sum + value, 0);
    return { start, values: values.map((value) => Math.trunc((value / total) * ONE + (value < 0 ? -0.5 : 0.5))) };
  });
}

// Resizes one side of a picture of bytes, three channels per pixel. along: from one pixel to the next on this side.
// across: from one line of such pixels to the next. The lines of the result go the other way.
function resize(bytes, along, across, lines, sides) {
  const result = new Uint8ClampedArray(3 * lines * sides.length);
  let at = 0;
  for (const { start, values } of sides)
    for (let line = 0; line < lines; line++)
      for (let channel = 0; channel < 3; channel++) {
        let sum = ONE / 2;
        let from = line * across + start * along + channel;
        for (let i = 0; i < values.length; i++, from += along) sum += bytes[from] * values[i];
        result[at++] = sum >> 22;
      }
  return result;
}

function pixelsOf(picture) {
  const context = new OffscreenCanvas(picture.width, picture.height).getContext("2d", { willReadFrequently: true });
  context.fillStyle = "white"; // behind transparent pixels
  context.fillRect(0, 0, picture.width, picture.height);
  context.drawImage(picture, 0, 0);
  return context.getImageData(0, 0, picture.width, picture.height).data;
}

// picture: an ImageBitmap. Returns the prepared image, a Float32Array, channels first.
export function prepare(picture, wants) {
  const { width, height, interpolation } = wants;
  const [wide, high] = resized(picture.width, picture.height, wants);
  const [left, top] = [start(wide, width, wants.position), start(high, height, wants.position)];
  const [firstColumn, firstRow] = [Math.max(left, 0), Math.max(top, 0)];
  const [columns, rows] = [Math.min(left + width, wide) - firstColumn, Math.min(top + height, high) - firstRow];
  const across = factors(picture.width, wide, firstColumn, columns, interpolation);
  const down = factors(picture.height, high, firstRow, rows, interpolation);
  const turned = resize(pixelsOf(picture), 4, 4 * picture.width, picture.height, across);
  const pixels = resize(turned, 3, 3 * picture.height, columns, down);
  const image = new Float32Array(3 * width * height);
  for (let channel = 0; channel < 3; channel++) {
    const from = wants.channels === "bgr" ? 2 - channel : channel;
    const [rescale, mean, std] = [wants.rescale, wants.mean[channel], wants.std[channel]].map(Math.fround);
    const normalise = (value) => Math.fround(Math.fround(Math.fround(value) * rescale) - mean) / std;
    const values = Float32Array.from({ length: 256 }, (_, value) => normalise(value));
    const plane = image.subarray(channel * width * height, (channel + 1) * width * height);
    plane.fill(normalise(wants.fill?.[from] ?? 255));
    for (let y = 0; y < rows; y++)
      for (let x = 0; x < columns; x++)
        plane[(firstRow - top + y) * width + firstColumn - left + x] = values[pixels[3 * (y * columns + x) + from]];
  }
  return image;
}
