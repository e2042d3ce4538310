#include "bbattery.h"
