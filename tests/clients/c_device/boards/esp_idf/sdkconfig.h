#pragma once
#define CONFIG_LOCK_WIFI_NAME "home"
#define CONFIG_LOCK_WIFI_PASSWORD "secret"
#define CONFIG_LOCK_BROKER "192.168.1.5"
#define CONFIG_LOCK_PORT 7883
#define CONFIG_LOCK_NAME "lock-1"
#define CONFIG_LOCK_TOKEN "duly_token"
#define CONFIG_LOCK_KEY ""
#define CONFIG_LOCK_TIME_SERVER "pool.ntp.org"
#define CONFIG_LOCK_PIN 5
