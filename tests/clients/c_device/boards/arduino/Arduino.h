#pragma once
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#define HIGH 0x1
#define LOW 0x0
#define OUTPUT 0x03
void pinMode(uint8_t pin, uint8_t mode);
void digitalWrite(uint8_t pin, uint8_t level);
void delay(uint32_t ms);
void configTime(long offset, int daylight, const char *server);
class HardwareSerial {
public:
  void begin(unsigned long baud);
  __attribute__((format(printf, 2, 3))) size_t printf(const char *format, ...);
  size_t println(const char *text);
};
extern HardwareSerial Serial;
void setup();
void loop();
