// In place of TestU01: batteries without a test.
#pragma once

struct unif01_Gen {
  void *state, *param;
  char* name;
  double (*GetU01)(void*, void*);
  unsigned long (*GetBits)(void*, void*);
  void (*Write)(void*);
};

static int swrite_Basic, bbattery_NTests;
static double bbattery_pVal[1];
static char* bbattery_TestNames[1];
static void bbattery_RepeatSmallCrush(unif01_Gen*, int*) {}
static void bbattery_RepeatCrush(unif01_Gen*, int*) {}
static void bbattery_RepeatBigCrush(unif01_Gen*, int*) {}
