"""Devices: what their matrix units multiply, how fast they are, and XLA's flags."""

from .device import Device as Device
from .peaks import Peaks as Peaks, is_narrow as is_narrow
from .roofline import Efficiency as Efficiency
from .traffic import Traffic as Traffic
