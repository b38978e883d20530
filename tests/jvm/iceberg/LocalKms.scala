package ags.judge

import java.io.File
import java.nio.ByteBuffer
import java.nio.charset.StandardCharsets.UTF_8
import java.nio.file.Files
import java.security.SecureRandom
import java.util.{Base64, Map => JavaMap}
import javax.crypto.{Cipher, Mac}
import javax.crypto.spec.{GCMParameterSpec, SecretKeySpec}

import scala.jdk.CollectionConverters._

import com.fasterxml.jackson.databind.{JsonNode, ObjectMapper}
import org.apache.iceberg.encryption.KeyManagementClient

/** Iceberg's KMS over the keystore file of ags_fast's local KMS, of which ags_fast/keys/kms/local.py says what is in it.
  * What one of the two wraps, the other unwraps.
  */
class LocalKms extends KeyManagementClient {
  private var properties: JavaMap[String, String] = _

  override def initialize(all: JavaMap[String, String]): Unit = properties = new java.util.HashMap(all)

  override def wrapKey(key: ByteBuffer, keyId: String): ByteBuffer = {
    val (version, master) = versions(keyId).filter(_.path("state").textValue == "enabled") match {
      case Seq()    => throw new IllegalArgumentException(s"the keystore has no enabled version of the key $keyId")
      case enabled  => enabled.map(one => (one.required("version").intValue, one)).maxBy(_._1)
    }
    val nonce = new Array[Byte](12)
    new SecureRandom().nextBytes(nonce)
    val head = ByteBuffer.allocate(5).order(java.nio.ByteOrder.LITTLE_ENDIAN).put(1.toByte).putInt(version).array
    val wrapped = aes(Cipher.ENCRYPT_MODE, masterKey(keyId, master), nonce, bytes(key), keyId)
    ByteBuffer.wrap(head ++ nonce ++ wrapped)
  }

  override def unwrapKey(wrappedKey: ByteBuffer, keyId: String): ByteBuffer = {
    val blob = bytes(wrappedKey) // 1, the version of the master key in 4 bytes, nonce, ciphertext, tag
    val number = BigInt(blob.slice(1, 5).reverse).toInt
    val master = versions(keyId)
      .find(one => one.required("version").intValue == number && one.path("state").textValue == "enabled")
      .getOrElse(throw new IllegalArgumentException(s"the keystore has no enabled version $number of the key $keyId"))
    ByteBuffer.wrap(open(masterKey(keyId, master), blob.drop(5), keyId))
  }

  /** The keystore as the file has it now: its keys may have been turned since the last call. */
  private lazy val mapper = new ObjectMapper
  private def outer: JsonNode = mapper.readTree(new File(properties.get("kms.local.path")))

  private def storeKey(outer: JsonNode): Array[Byte] = {
    val mac = Mac.getInstance("HmacSHA256")
    val secret = Files.readAllBytes(new File(properties.get("kms.local.key-file")).toPath)
    mac.init(new SecretKeySpec(secret, "HmacSHA256"))
    mac.update("ags-keystore\u0000".getBytes(UTF_8))
    mac.doFinal(decode(outer.required("kdf").required("salt").textValue))
  }

  private def versions(keyId: String): Seq[JsonNode] = {
    val store = outer
    val body = store.required("body").textValue
    val id = store.required("store_id").textValue
    open(storeKey(store), decode(store.required("seal").textValue), s"ags-keystore/body\u0000$id\u0000$body")
    mapper.readTree(body).required("keys").path(keyId).path("versions").asScala.toSeq
  }

  private def masterKey(keyId: String, master: JsonNode): Array[Byte] = {
    val store = outer
    val (id, number) = (store.required("store_id").textValue, master.required("version").intValue)
    val aad = s"ags-keystore/key\u0000$id\u0000$number\u0000$keyId"
    open(storeKey(store), decode(master.required("sealed").textValue), aad)
  }

  private def open(key: Array[Byte], sealedBytes: Array[Byte], aad: String): Array[Byte] =
    aes(Cipher.DECRYPT_MODE, key, sealedBytes.take(12), sealedBytes.drop(12), aad)

  private def aes(mode: Int, key: Array[Byte], nonce: Array[Byte], data: Array[Byte], aad: String): Array[Byte] = {
    val cipher = Cipher.getInstance("AES/GCM/NoPadding")
    cipher.init(mode, new SecretKeySpec(key, "AES"), new GCMParameterSpec(128, nonce))
    cipher.updateAAD(aad.getBytes(UTF_8))
    cipher.doFinal(data)
  }

  private def bytes(buffer: ByteBuffer): Array[Byte] = {
    val copy = new Array[Byte](buffer.remaining)
    buffer.duplicate.get(copy)
    copy
  }

  private def decode(text: String): Array[Byte] = Base64.getDecoder.decode(text)
}
