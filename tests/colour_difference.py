"""How different two colours look: CAM02-UCS (Luo, Cui, Li 2006), for people with and without all cones.

CIECAM02 under the viewing conditions of sRGB (64 lux, grey surround of 20 %, white D65), then uniform coordinates.
Dichromats are simulated in linear RGB with the matrices of Machado, Oliveira and Fernandes (2009), severity 1.
"""

from __future__ import annotations

import numpy as np

_TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
_CAT02 = np.array([[0.7328, 0.4296, -0.1624], [-0.7036, 1.6975, 0.0061], [0.0030, 0.0136, 0.9834]])
_HPE = np.array([[0.38971, 0.68898, -0.07868], [-0.22981, 1.18340, 0.04641], [0.0, 0.0, 1.0]])
DICHROMATS = {
    "protanope": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranope": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanope": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def linear(colour: str) -> np.ndarray:
    """The linear RGB of `#rrggbb`."""
    channels = np.array([int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)])
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def uniform(rgb: np.ndarray) -> np.ndarray:
    """J', a', b' of a linear RGB."""
    xyz, white = _TO_XYZ @ rgb * 100, _TO_XYZ @ np.ones(3) * 100
    adapting, background, surround = 64 / np.pi / 5, 20.0, (1.0, 0.69, 1.0)  # F, c, N_c
    degree = surround[0] * (1 - np.exp((-adapting - 42) / 92) / 3.6)
    k = 1 / (5 * adapting + 1)
    luminance = 0.2 * k**4 * 5 * adapting + 0.1 * (1 - k**4) ** 2 * (5 * adapting) ** (1 / 3)
    n = background / white[1]
    induction, z = 0.725 * (1 / n) ** 0.2, 1.48 + np.sqrt(n)

    def response(values: np.ndarray) -> np.ndarray:
        cones = _CAT02 @ values
        adapted = (white[1] * degree / (_CAT02 @ white) + 1 - degree) * cones
        cones = _HPE @ np.linalg.solve(_CAT02, adapted)
        power = (luminance * np.abs(cones) / 100) ** 0.42
        return np.sign(cones) * 400 * power / (power + 27.13) + 0.1

    red, green, blue = response(xyz)
    a, b = red - 12 * green / 11 + blue / 11, (red + green - 2 * blue) / 9
    hue = np.arctan2(b, a)
    eccentricity = (np.cos(hue + 2) + 3.8) / 4

    def achromatic(values: np.ndarray) -> float:
        return float((2 * values[0] + values[1] + values[2] / 20 - 0.305) * induction)

    lightness = 100 * (achromatic(response(xyz)) / achromatic(response(white))) ** (surround[1] * z)
    t = 50000 / 13 * surround[2] * induction * eccentricity * np.hypot(a, b) / (red + green + 21 * blue / 20)
    chroma = t**0.9 * np.sqrt(lightness / 100) * (1.64 - 0.29**n) ** 0.73
    colourfulness = np.log1p(0.0228 * chroma * luminance**0.25) / 0.0228
    return np.array(
        [1.7 * lightness / (1 + 0.007 * lightness), *(colourfulness * np.array([np.cos(hue), np.sin(hue)]))]
    )


def difference(first: str, second: str, viewer: str | None = None) -> float:
    """The distance of two colours for a dichromat, or for somebody with all cones."""
    matrix = np.eye(3) if viewer is None else DICHROMATS[viewer]
    places = [uniform(np.clip(matrix @ linear(colour), 0, 1)) for colour in (first, second)]
    return float(np.linalg.norm(places[0] - places[1]))
