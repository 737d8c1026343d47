/* The wireless network and the time: both come when they come, and the device need not wait for them. */

#ifndef DULY_WIFI_H
#define DULY_WIFI_H

/* Begin to connect to the network; a lost connection is made again. Then the clock is set by NTP. */
void wifi_begin(const char *name, const char *password, const char *time_server);

#endif
