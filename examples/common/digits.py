"""Handwritten digits on photos: images with the class of each pixel, and boxes."""

import numpy as np

from common.files import InputError
from common.images import normalize

# Validation images are the same for every --seed, so that runs can be compared.
VALIDATION_SEED = 0


class DigitsOnPhotos:
    """Real handwritten digits on crops of real photos: normalized images (3, size, size), and
    labels (size, size): 0 background, digit + 1.

    Both come with scikit-learn. Two to five bright digits of 20 to 32 pixels lie anywhere on a crop
    dimmed to half; from the third on, a digit that finds no free place is left out. A fifth of the
    digits and a quarter of each photo are kept for validation.
    """

    names = ("background",) + tuple(f"digit {digit}" for digit in range(10))
    DIGIT_SIZES = range(20, 33)
    DIGITS_PER_IMAGE = range(2, 6)
    EPOCH = {"train": 1000, "val": 200}
    PLACES = 20  # that are tried for each digit
    INK = 0.3  # of full strength: what is fainter stays background

    def __init__(self, split, seed, size=64, images=None):
        from sklearn.datasets import load_digits, load_sample_images

        self._key = (seed, list(self.EPOCH).index(split))
        self._images = images or self.EPOCH[split]
        self._size = size

        digits = load_digits()
        # The file goes writer by writer, so a fifth of each stretch is held back.
        held_back = np.arange(len(digits.images)) % 5 == 0
        chosen = held_back if split == "val" else ~held_back
        self._digits = digits.images[chosen].astype(np.float32) / 16
        self._classes = digits.target[chosen].astype(np.int32) + 1
        self._enlarge = {n: _interpolation(8, n) for n in self.DIGIT_SIZES}

        self._photos = []
        for photo in load_sample_images().images:
            dimmed = photo.transpose(2, 0, 1) / np.float32(510)
            quarters = np.array_split(dimmed, 4, axis=2)
            self._photos += [quarters[1]] if split == "val" else quarters[:1] + quarters[2:]
        largest = min(min(photo.shape[1:]) for photo in self._photos)
        if not max(self.DIGIT_SIZES) <= size <= largest:
            raise InputError(
                f"--size is {size}, but digits on photos come in {max(self.DIGIT_SIZES)} to "
                f"{largest} pixels: choose a size in between"
            )

    def __len__(self):
        return self._images

    def __getitem__(self, index):
        image, label, _ = self.sample(index)
        return normalize(image), label

    def sample(self, index):
        """The image from 0 to 1, its labels, and its digits as (x0, y0, x1, y1, digit): the first
        and the last column and row with ink."""
        rng = np.random.default_rng(self._key + (index,))
        photo = self._photos[rng.integers(len(self._photos))]
        y, x = (rng.integers(side - self._size + 1) for side in photo.shape[1:])
        image = photo[:, y : y + self._size, x : x + self._size]
        image = (image[:, :, ::-1] if rng.integers(2) else image).copy()
        label = np.zeros((self._size, self._size), np.int32)
        boxes = []
        for _ in range(rng.choice(self.DIGITS_PER_IMAGE)):
            anywhere = len(boxes) < min(self.DIGITS_PER_IMAGE)
            boxes += self._paste(rng, image, label, anywhere)
        return image, label, boxes

    def _paste(self, rng, image, label, anywhere):
        """Draw a digit where it covers no other; without `anywhere` leave out one with no room.
        Returns the boxes of what was drawn."""
        which = rng.integers(len(self._digits))
        side = rng.choice(self.DIGIT_SIZES)
        colour = rng.uniform(0.7, 1, (3, 1, 1)).astype(np.float32)
        places = rng.integers(self._size - side + 1, size=(self.PLACES, 2))
        covered = [(label[y : y + side, x : x + side] > 0).sum() for y, x in places]
        best = np.argmin(covered)
        if covered[best] and not anywhere:
            return []
        y, x = places[best]
        enlarge = self._enlarge[side]
        # In 256 steps, so that no library's rounding changes the data.
        ink = np.round(256 * (enlarge @ self._digits[which] @ enlarge.T)) / 256
        region = image[:, y : y + side, x : x + side]
        region += (colour - region) * ink
        label[y : y + side, x : x + side][ink > self.INK] = self._classes[which]
        rows, columns = np.nonzero(ink > self.INK)
        ends = x + columns.min(), y + rows.min(), x + columns.max(), y + rows.max()
        return [(*map(int, ends), int(self._classes[which]) - 1)]


def _interpolation(old, new):
    """The matrix (new, old) that enlarges a line of `old` pixels linearly, edges held."""
    positions = (np.arange(new) + 0.5) * old / new - 0.5
    columns = [np.interp(positions, np.arange(old), unit) for unit in np.eye(old)]
    return np.stack(columns, axis=1).astype(np.float32)
