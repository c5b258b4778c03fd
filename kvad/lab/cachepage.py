"""stub"""

from kvad.lab.slide import Slide


def page(slide: Slide) -> str:
    return ""
