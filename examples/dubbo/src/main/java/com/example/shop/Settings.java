package com.example.shop;

import org.apache.dubbo.config.AbstractInterfaceConfig;
import org.apache.dubbo.config.ApplicationConfig;
import org.apache.dubbo.config.RegistryConfig;

/** The settings that the provider and the consumer share: system properties, {@code -Dport=50051}. */
final class Settings {
    private Settings() {}

    static String get(String name, String otherwise) {
        return System.getProperty(name, otherwise);
    }

    static ApplicationConfig application(String otherwise) {
        ApplicationConfig application = new ApplicationConfig(get("application", otherwise));
        application.setQosEnable(false);
        String metadata = get("metadata", "");
        if (!metadata.isEmpty()) {
            application.setMetadataType(metadata); // "remote": in ZooKeeper
        }
        return application;
    }

    static RegistryConfig registry() {
        RegistryConfig registry = new RegistryConfig(get("registry", "zookeeper://127.0.0.1:2181"));
        registry.setRegisterMode(get("level", "all")); // interface, instance or all
        return registry;
    }

    static void serviceOf(AbstractInterfaceConfig config) {
        String group = get("group", "");
        if (!group.isEmpty()) {
            config.setGroup(group);
        }
        String version = get("version", "");
        if (!version.isEmpty()) {
            config.setVersion(version);
        }
    }
}
