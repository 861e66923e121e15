"""Pictures of environments in NumPy, without a display: rectangles, discs, names. Colours are numbers from 0 to 1."""

import colorsys
import functools
import os

import numpy as np


def canvas(height: int, width: int) -> np.ndarray:
    """An empty picture (H, W, 3), float from 0 to 1."""
    return np.full((height, width, 3), 0.97)


def finished(frame: np.ndarray) -> np.ndarray:
    """The picture as (H, W, 3) uint8."""
    return (frame.clip(0, 1) * 255).round().astype(np.uint8)


def blend(frame: np.ndarray, cover: np.ndarray, color) -> None:
    """Lay a colour on a picture, or on a part of it, where cover (H, W) is 1."""
    frame += cover[..., None] * (np.asarray(color) - frame)


def disc(frame: np.ndarray, row: float, column: float, radius: float, color, inside: float = -1.0) -> None:
    """A disc around (row, column), in pixels, with soft edges; a ring, where a radius `inside` is left out."""
    rows, columns = np.arange(frame.shape[0])[:, None] + 0.5, np.arange(frame.shape[1]) + 0.5
    away = np.hypot(rows - row, columns - column)
    blend(frame, np.clip(radius - away + 0.5, 0, 1) * np.clip(away - inside + 0.5, 0, 1), color)


def rectangle(frame: np.ndarray, top: float, left: float, height: float, width: float, color) -> None:
    """A filled rectangle, in pixels."""
    frame[round(top) : round(top + height), round(left) : round(left + width)] = color


def text(frame: np.ndarray, row: float, column: float, words: str, color=(0, 0, 0), size: int = 16) -> None:
    """Words whose middle is at (row, column); what is outside the picture is left out."""
    cover = letters(words, size)
    top, left = round(row - cover.shape[0] / 2), round(column - cover.shape[1] / 2)
    cover = cover[max(0, -top) :, max(0, -left) :]
    part = frame[max(0, top) : top + len(cover) + max(0, -top), max(0, left) : left + cover.shape[1] + max(0, -left)]
    part = part[: cover.shape[0], : cover.shape[1]]
    blend(part, cover[: part.shape[0], : part.shape[1]], color)


@functools.lru_cache(512)
def letters(words: str, size: int) -> np.ndarray:
    """How much of each pixel (H, W) the words cover, in pygame's own font."""
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    import pygame  # takes a tenth of a second, and only pictures need it

    pygame.font.init()
    picture = pygame.font.Font(None, size).render(words, True, (0, 0, 0))
    return pygame.surfarray.array_alpha(picture).T / 255


def hues(number: int) -> list[tuple[float, float, float]]:
    """As many colours, as unlike as can be, none of them bright or dark."""
    return [colorsys.hls_to_rgb((0.6 + i / max(1, number)) % 1, 0.5, 0.6) for i in range(number)]


def shades(colors: list) -> list[tuple[float, float, float]]:
    """The colours of all agents; those of one colour get shades of it, from dark to light."""
    result = []
    for i, color in enumerate(colors):
        same = [k for k, other in enumerate(colors) if tuple(other) == tuple(color)]
        light = 0.0 if len(same) == 1 else 0.8 * same.index(i) / (len(same) - 1) - 0.45  # -0.45 to 0.35
        towards = np.ones(3) if light > 0 else np.zeros(3)
        result.append(tuple(np.asarray(color) + abs(light) * (towards - color)))
    return result
