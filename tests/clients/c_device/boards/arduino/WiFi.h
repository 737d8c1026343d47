#pragma once
#include <stddef.h>
#include <stdint.h>
typedef enum { WL_IDLE_STATUS = 0, WL_CONNECTED = 3 } wl_status_t;
typedef enum { WIFI_STA = 1 } wifi_mode_t;
class WiFiClass {
public:
  bool mode(wifi_mode_t mode);
  wl_status_t begin(const char *name, const char *password);
  wl_status_t status();
};
extern WiFiClass WiFi;
class WiFiClient {
public:
  int connect(const char *host, uint16_t port, int32_t timeout_ms);
  int setNoDelay(bool on);
  int available();
  int read(uint8_t *bytes, size_t size);
  size_t write(const uint8_t *bytes, size_t size);
  uint8_t connected();
  void stop();
};
