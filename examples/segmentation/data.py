"""Digits on photos: a segmentation task that needs no download; and batches of any data set.

A data set has `names` (of its classes), `fingerprint`, `len()` (one epoch) and `sample(index)` with
index 0, 1, 2, ... without end: image (3, size, size) float32 and label (size, size) uint8. A sample
depends on the data set's seed and its index alone, so a run can continue anywhere without
having stored the state of a generator.
"""

import collections
import concurrent.futures
import contextlib

import numpy as np

IGNORED = 255  # a pixel with this label counts in neither loss nor metrics
SPLITS = {"train": 0, "val": 1}


class DataError(Exception):
    """Something is wrong with the data: what came, what was expected, what to do."""


@contextlib.contextmanager
def readable(what):
    """Within it, an error of the system is a DataError of `what` is read."""
    try:
        yield
    except BrokenPipeError:  # Of what is told meanwhile.
        raise
    except OSError as error:
        raise DataError(
            f"{what} cannot be read ({error}): name another folder, or make it readable"
        ) from None


class DigitsOnPhotos:
    """Real handwritten digits on crops of real photos; labels: 0 background, digit + 1.

    Both come with scikit-learn. Two to five bright digits of 20 to 32 pixels lie anywhere on a crop
    dimmed to half; from the third on, a digit that finds no free place is left out. A fifth of the
    digits and a quarter of each photo are kept for validation. `brightness` varies each image as
    image * exp(U(-.6, .6)) + .3 * U(-.6, .6).
    """

    names = ("background",) + tuple(f"digit {digit}" for digit in range(10))
    fingerprint = "digits on photos 1"
    DIGIT_SIZES = range(20, 33)
    DIGITS_PER_IMAGE = range(2, 6)
    EPOCH = {"train": 1000, "val": 200}
    PLACES = 20  # that are tried for each digit
    INK = 0.3  # of full strength: what is fainter stays background

    def __init__(self, split, seed, size=64, brightness=False, images=None):
        from sklearn.datasets import load_digits, load_sample_images

        self._key = (seed, SPLITS[split])
        self.images = images or self.EPOCH[split]
        self._size = size
        self._brightness = brightness

        digits = load_digits()
        # The file goes writer by writer, so a fifth of each stretch is held back.
        held_back = np.arange(len(digits.images)) % 5 == 0
        chosen = held_back if split == "val" else ~held_back
        self.digit_ids = np.flatnonzero(chosen)
        self._digits = digits.images[chosen].astype(np.float32) / 16
        self._classes = digits.target[chosen].astype(np.uint8) + 1
        self._enlarge = {n: _interpolation(8, n) for n in self.DIGIT_SIZES}

        self._photos = []
        for photo in load_sample_images().images:
            dimmed = photo.transpose(2, 0, 1) / np.float32(510)
            quarters = np.array_split(dimmed, 4, axis=2)
            self._photos += [quarters[1]] if split == "val" else quarters[:1] + quarters[2:]
        largest = min(min(photo.shape[1:]) for photo in self._photos)
        if not max(self.DIGIT_SIZES) <= size <= largest:
            raise DataError(
                f"--size is {size}, but digits on photos come in {max(self.DIGIT_SIZES)} to "
                f"{largest} pixels; choose a size in between, or give your own images with --data"
            )

    def __len__(self):
        return self.images

    def sample(self, index):
        rng = np.random.default_rng(self._key + (index,))
        image = self._background(rng)
        label = np.zeros((self._size, self._size), np.uint8)
        pasted = 0
        for _ in range(rng.choice(self.DIGITS_PER_IMAGE)):
            pasted += self._paste(rng, image, label, anywhere=pasted < min(self.DIGITS_PER_IMAGE))
        if self._brightness:
            image *= np.exp(rng.uniform(-0.6, 0.6))
            image += 0.3 * rng.uniform(-0.6, 0.6)
        return image, label

    def _background(self, rng):
        photo = self._photos[rng.integers(len(self._photos))]
        y = rng.integers(photo.shape[1] - self._size + 1)
        x = rng.integers(photo.shape[2] - self._size + 1)
        crop = photo[:, y : y + self._size, x : x + self._size]
        return (crop[:, :, ::-1] if rng.integers(2) else crop).copy()

    def _paste(self, rng, image, label, anywhere):
        """Draw a digit where it covers no other; without `anywhere` leave out one with no room."""
        which = rng.integers(len(self._digits))
        side = rng.choice(self.DIGIT_SIZES)
        colour = rng.uniform(0.7, 1, (3, 1, 1)).astype(np.float32)
        places = rng.integers(self._size - side + 1, size=(self.PLACES, 2))
        covered = _ink_under(label, places, side)
        best = covered.argmin()
        if covered[best] and not anywhere:
            return False
        y, x = places[best]
        enlarge = self._enlarge[side]
        ink = enlarge @ self._digits[which] @ enlarge.T
        region = image[:, y : y + side, x : x + side]
        region += (colour - region) * ink
        label[y : y + side, x : x + side][ink > self.INK] = self._classes[which]
        return True


def _ink_under(label, places, side):
    """How many labelled pixels the squares of `side` at `places` (n, 2) cover."""
    height, width = label.shape
    # The sum over any square is a sum of four corners of the summed-area table.
    table = np.zeros((height + 1, width + 1), np.int32)
    table[1:, 1:] = (label > 0).cumsum(0).cumsum(1)
    y, x = places.T
    return table[y + side, x + side] - table[y, x + side] - table[y + side, x] + table[y, x]


def _interpolation(old, new):
    """The matrix (new, old) that enlarges a line of `old` pixels linearly, edges held."""
    positions = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    left = np.minimum(positions.astype(int), old - 2)
    matrix = np.zeros((new, old), np.float32)
    matrix[np.arange(new), left] = left + 1 - positions
    matrix[np.arange(new), left + 1] = positions - left
    return matrix


def pixel_counts(labels, classes):
    """How many pixels are background, and of another class."""
    counts = np.bincount(labels.ravel(), minlength=256)[:classes]
    return np.array([counts[0], counts[1:].sum()])


def pixel_weights(labels, classes, background_weight, counts):
    """Weights of the pixels of a batch, or of a part of it: `background_weight` to 1 between class
    0 and the others, ignored pixels 0. They sum to 1 over the batch that has these `counts`."""
    of_class = np.zeros(256)
    of_class[:classes] = 1
    of_class[0] = background_weight
    total = counts[0] * background_weight + counts[1]
    return (of_class / max(total, 1e-6)).astype(np.float32)[labels]


def stack(dataset, indices):
    """The samples as one batch: images (N, 3, H, W) float32, labels (N, H, W) uint8."""
    images, labels = zip(*(dataset.sample(index) for index in indices))
    return np.stack(images), np.stack(labels)


def batches(dataset, chunks, threads=1):
    """Yield `stack(dataset, indices)` for each of `chunks`, prepared ahead by other threads."""
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:
        ahead = collections.deque()
        try:
            for indices in chunks:
                ahead.append(pool.submit(stack, dataset, indices))
                if len(ahead) > threads + 1:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            for future in ahead:
                future.cancel()
